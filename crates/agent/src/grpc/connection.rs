//! A peer's connection, which is closed when the peer shows no sign of life, so that its slot becomes free.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::time::{Instant, Sleep, sleep};
use tonic::transport::server::Connected;

use super::authority::Frames;
use crate::unix::{Peer, Slot};

/// At most this many bytes are read at once.
const CHUNK: usize = 8192;

/// A connection with its slot. Reading fails after `silence` without input. A peer that is alive answers the server's
/// pings, so it is never silent for so long.
pub(super) struct Connection {
    stream: UnixStream,
    _slot: Slot,
    silence: Duration,
    silent: Pin<Box<Sleep>>,
    frames: Frames,
}

impl Connection {
    /// Wraps a connection that is closed after `silence` without input.
    pub(super) fn new(peer: Peer, silence: Duration) -> Self {
        Self {
            stream: peer.stream,
            _slot: peer.slot,
            silence,
            silent: Box::pin(sleep(silence)),
            frames: Frames::new(),
        }
    }

    /// Reads what the peer has sent, before [`Frames`] rewrites it.
    fn poll_raw(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, buf) {
            self.silent.as_mut().reset(Instant::now() + self.silence);
            return Poll::Ready(read);
        }
        ready!(self.silent.as_mut().poll(cx));
        let text = format!("the peer has said nothing for {:?}", self.silence);
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, text)))
    }
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.frames.is_empty() {
            let mut bytes = [0; CHUNK];
            let mut chunk = ReadBuf::new(&mut bytes);
            ready!(this.poll_raw(cx, &mut chunk))?;
            if chunk.filled().is_empty() {
                this.frames.end();
                break;
            }
            this.frames.put(chunk.filled());
        }
        this.frames
            .give(buf.remaining(), |bytes| buf.put_slice(bytes));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use prometheus::IntGauge;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::unix::Socket;

    #[tokio::test]
    async fn it_is_cut_after_a_silence_and_not_while_something_comes() {
        const SILENCE: Duration = Duration::from_millis(400);
        let folder = crate::files::temp_folder();
        let path = folder.join("x.sock");
        let open = IntGauge::new("g", "g").unwrap();
        let socket = Socket::bind(&path, 1, open.clone()).unwrap();
        let mut peer = UnixStream::connect(&path).await.unwrap();
        let mut connection = Connection::new(socket.accept().await, SILENCE);
        let begun = Instant::now();
        let mut last = begun;
        while begun.elapsed() < 2 * SILENCE {
            last = Instant::now();
            peer.write_all(b"x").await.unwrap();
            assert_eq!(connection.read_u8().await.unwrap(), b'x');
            sleep(SILENCE / 10).await;
        }
        let error = connection.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        assert!(last.elapsed() >= SILENCE);
        drop(connection);
        assert_eq!(open.get(), 0, "its place is free");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
