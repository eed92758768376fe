//! Makes a routing daemon read its configuration again.

use std::fs;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::str::FromStr;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::time::timeout;

use super::bird;

/// The time limit of a reload, by the daemon or by the command.
const LIMIT: Duration = Duration::from_secs(10);
/// The most characters of an answer that an error quotes.
const MOST_QUOTED: usize = 300;

/// How the agent makes the routing daemon read its configuration again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reload {
    /// The daemon notices a new file by itself
    None,
    /// The agent sends `configure` to BIRD's control socket. BIRD answers once it has read the file
    Bird(PathBuf),
    /// The agent sends SIGHUP to every process of this name
    Process(String),
    /// The agent runs this program with these arguments. Success is an exit code of 0
    Command(Vec<String>),
}

impl FromStr for Reload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (how, what) = text.split_once('=').unwrap_or((text, ""));
        match (how, what) {
            ("none", "") => Ok(Self::None),
            ("bird", path) if path.starts_with('/') => Ok(Self::Bird(path.into())),
            // The kernel truncates longer names of processes.
            ("process", name) if (1..=15).contains(&name.len()) => Ok(Self::Process(name.into())),
            ("command", line) if line.starts_with('/') => {
                let words = line.split_whitespace().map(str::to_owned);
                Ok(Self::Command(words.collect()))
            }
            _ => Err(format!(
                "\"{text}\" is not none, bird=/PATH/OF/bird.ctl, process=NAME (of at most 15 characters) or command=/PATH ARGUMENTS"
            )),
        }
    }
}

/// Why a reload failed: the daemon could not be reached, or did not accept its configuration.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReloadError {
    #[error("{path}: {text}", path = path.display())]
    Bird { path: PathBuf, text: String },
    #[error("no process of the name {0} is visible to the agent")]
    NoProcess(String),
    #[error("cannot send SIGHUP to {0}: {1}")]
    Signal(String, rustix::io::Errno),
    #[error("cannot run {0}: {1}")]
    Start(String, std::io::Error),
    #[error("{0} has ended with {1}: {2}")]
    Command(String, std::process::ExitStatus, String),
    #[error("no answer within {} seconds", LIMIT.as_secs())]
    Late,
}

impl Reload {
    /// Makes the daemon read its configuration. Fails if this takes longer than [`LIMIT`].
    pub(super) async fn run(&self) -> Result<(), ReloadError> {
        let told = async {
            match self {
                Self::None => Ok(()),
                Self::Bird(path) => {
                    let done = bird::configure(path).await;
                    done.map_err(|text| ReloadError::Bird {
                        path: path.clone(),
                        text: cut(&text),
                    })
                }
                Self::Process(name) => hang_up(name),
                Self::Command(words) => command(words).await,
            }
        };
        timeout(LIMIT, told).await.unwrap_or(Err(ReloadError::Late))
    }
}

fn hang_up(name: &str) -> Result<(), ReloadError> {
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|it| it.file_name().to_str()?.parse::<i32>().ok());
    let is_named = |pid: &i32| {
        let comm = fs::read_to_string(format!("/proc/{pid}/comm"));
        comm.is_ok_and(|it| it.trim_end() == name)
    };
    let mut any = false;
    for pid in pids.filter(is_named).filter_map(Pid::from_raw) {
        match kill_process(pid, Signal::HUP) {
            Ok(()) => any = true,
            // The process has ended since the folder was read.
            Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(ReloadError::Signal(name.to_owned(), error)),
        }
    }
    if any {
        Ok(())
    } else {
        Err(ReloadError::NoProcess(name.to_owned()))
    }
}

async fn command(words: &[String]) -> Result<(), ReloadError> {
    let (program, arguments) = words
        .split_first()
        .map_or(("", &[][..]), |(first, rest)| (first, rest));
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .output()
        .await
        .map_err(|error| ReloadError::Start(program.to_owned(), error))?;
    if status.success() {
        return Ok(());
    }
    let said = if stderr.is_empty() { stdout } else { stderr };
    let said = cut(&String::from_utf8_lossy(&said));
    Err(ReloadError::Command(program.to_owned(), status, said))
}

/// Returns the first [`MOST_QUOTED`] characters of `text`, without line breaks.
fn cut(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").chars().take(MOST_QUOTED).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_that_does_not_exist_is_an_error_that_names_all() {
        let parse = |text: &str| text.parse::<Reload>();
        assert_eq!(parse("none"), Ok(Reload::None));
        assert_eq!(
            parse("bird=/run/bird.ctl"),
            Ok(Reload::Bird("/run/bird.ctl".into()))
        );
        assert_eq!(
            parse("process=gobgpd"),
            Ok(Reload::Process("gobgpd".to_owned()))
        );
        let words = ["/bin/x", "a", "b=c"].map(str::to_owned).to_vec();
        assert_eq!(parse("command=/bin/x a  b=c"), Ok(Reload::Command(words)));
        for text in [
            "",
            "bird",
            "bird=x",
            "none=1",
            "process=",
            "process=a-name-of-16-byt",
            "command=x",
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains("process=NAME"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_failed_command_is_quoted() {
        let run = async |words: &[&str]| {
            let words = words.iter().map(|it| (*it).to_owned()).collect();
            Reload::Command(words)
                .run()
                .await
                .map_err(|it| it.to_string())
        };
        assert_eq!(run(&["/bin/true"]).await, Ok(()));
        let error = run(&["/bin/sh", "-c", "echo no such; echo AS >&2; exit 3"]).await;
        let error = error.unwrap_err();
        assert!(
            error.contains("/bin/sh has ended with") && error.ends_with("3: AS"),
            "{error}"
        );
        let error = run(&["/nowhere/birdc"]).await.unwrap_err();
        assert!(error.starts_with("cannot run /nowhere/birdc: "), "{error}");
    }

    #[tokio::test]
    async fn a_process_is_found_by_its_name() {
        let folder = crate::files::temp_folder();
        let program = folder.join("cad-hup-test");
        fs::copy("/bin/sleep", &program).unwrap();
        // The test may have been started by nohup, and then its children ignore SIGHUP.
        let mut sleep = Command::new("env")
            .arg("--default-signal=HUP")
            .arg(&program)
            .arg("600")
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        // The name is that of `env` until the process has become the program.
        let comm = format!("/proc/{}/comm", sleep.id().unwrap());
        while fs::read_to_string(&comm).unwrap().trim() != "cad-hup-test" {
            tokio::task::yield_now().await;
        }
        let reload = Reload::Process("cad-hup-test".to_owned());
        reload.run().await.unwrap();
        let ended = timeout(Duration::from_secs(60), sleep.wait()).await;
        let status = ended.expect("SIGHUP ends it").unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(1)
        );
        let error = reload.run().await.unwrap_err().to_string();
        assert!(
            error.contains("no process of the name cad-hup-test"),
            "{error}"
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
