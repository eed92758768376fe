//! The command `configure` on the control socket of BIRD.
//!
//! A line of an answer begins with a code of four digits, or with a space if it continues the previous line. After the
//! code there is a space in the last line of the answer, and a hyphen in the lines before. A code that begins with 8 or
//! 9 means an error.

use std::path::Path;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

/// The most bytes that are read from the socket.
const MOST_BYTES: u64 = 64 * 1024;

/// Makes BIRD read its configuration, and waits until BIRD has accepted it. The error is a text for users.
pub(super) async fn configure(path: &Path) -> Result<(), String> {
    let stream = UnixStream::connect(path).await;
    let stream = stream.map_err(|error| format!("cannot connect: {error}. Does BIRD run?"))?;
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read.take(MOST_BYTES));
    answer(&mut lines).await?;
    let sent = write.write_all(b"configure\n").await;
    sent.map_err(|error| error.to_string())?;
    answer(&mut lines).await
}

/// Reads an answer up to its last line. If BIRD answers with an error, fails with the text of the answer.
async fn answer<R: tokio::io::AsyncRead + Unpin>(lines: &mut BufReader<R>) -> Result<(), String> {
    let mut all = String::new();
    loop {
        let mut line = String::new();
        let read = lines.read_line(&mut line).await;
        if read.map_err(|error| error.to_string())? == 0 {
            return Err(format!("BIRD has closed the connection: {all}"));
        }
        all.push_str(line.get(5..).unwrap_or(&line));
        let is_last = line.as_bytes().get(4) == Some(&b' ') && !line.starts_with(' ');
        if is_last {
            return match line.as_bytes()[0] {
                b'8' | b'9' => Err(all),
                _ => Ok(()),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(text: &str) -> Result<(), String> {
        answer(&mut BufReader::new(text.as_bytes())).await
    }

    #[tokio::test]
    async fn an_answer_ends_with_a_space_after_its_code() {
        assert_eq!(read("0001 BIRD 2.0.12 ready.\n").await, Ok(()));
        let accepted = "0002-Reading configuration from /etc/bird/bird.conf\n0003 Reconfigured\n";
        assert_eq!(read(accepted).await, Ok(()));
        let wrong = "0002-Reading configuration from /etc/bird/bird.conf\n8002 /etc/bird/bird.conf:3:1 syntax error\n";
        let error = read(wrong).await.unwrap_err();
        assert!(error.ends_with(":3:1 syntax error\n"), "{error}");
        let error = read("0002-Reading").await.unwrap_err();
        assert!(
            error.starts_with("BIRD has closed the connection: "),
            "{error}"
        );
    }
}
