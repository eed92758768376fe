//! Installs the executable of the CNI plugin in the runtime's directory.
//!
//! Linux does not allow writing to a running executable. But a new file can take the name of the executable, and
//! running processes keep the old file.

use std::fs;
use std::path::{Path, PathBuf};

use super::{FileError, put};

/// Copies an executable to `folder`, under its own name and with mode 0755. An identical file is not replaced. Returns
/// the path in `folder`, and whether the executable was copied.
pub fn install(from: &Path, folder: &Path) -> Result<(PathBuf, bool), FileError> {
    let bytes = fs::read(from).map_err(FileError::at("read", from))?;
    let to = folder.join(from.file_name().unwrap_or_default());
    let is_new = put(&to, &bytes, 0o755)?;
    Ok((to, is_new))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::files::temp_folder;

    #[test]
    fn an_executable_is_replaced_also_while_it_runs() {
        let folder = temp_folder();
        let (from, to) = (folder.join("plugin"), folder.join("bin"));
        fs::copy("/bin/cat", &from).unwrap();
        let (path, new) = install(&from, &to).unwrap();
        assert!(new && path == to.join("plugin"));
        assert!(!install(&from, &to).unwrap().1);
        let mut running = Command::new(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // Linux rejects writes to a running executable.
        assert!(fs::OpenOptions::new().write(true).open(&path).is_err());
        fs::copy("/bin/ls", &from).unwrap();
        assert!(install(&from, &to).unwrap().1);
        assert_eq!(fs::read(&path).unwrap(), fs::read("/bin/ls").unwrap());
        drop(running.stdin.take());
        assert!(running.wait().unwrap().success());
        assert_eq!(fs::read_dir(&to).unwrap().count(), 1);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn an_error_names_the_path_that_is_no_file() {
        let folder = temp_folder();
        for from in [folder.join("nothing"), folder.clone()] {
            let error = install(&from, &folder.join("bin")).unwrap_err().to_string();
            assert!(error.contains(&*from.to_string_lossy()), "{error}");
        }
        assert!(!folder.join("bin").exists());
        fs::remove_dir_all(folder).unwrap();
    }
}
