//! A client's connection. The connection is closed if nothing arrives for some time, so that another client can
//! connect.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::bytes::Bytes;
use tokio_util::codec::FramedRead;
use tokio_util::io::StreamReader;
use tonic::transport::server::Connected;

use super::authority::AuthorityDecoder;
use crate::unix::{Peer, Slot};

/// A connection, and its slot among the bounded number of connections. A client that is alive answers the server's
/// pings. So a client that sends nothing for longer than a ping interval is dead.
pub(super) struct Connection {
    reader: StreamReader<FramedRead<TimedReader, AuthorityDecoder>, Bytes>,
    writer: OwnedWriteHalf,
    _slot: Slot,
}

impl Connection {
    /// Wraps a connection. Reading from the connection fails once nothing has arrived for the time `silence`.
    pub(super) fn new(peer: Peer, silence: Duration) -> Self {
        let (stream, writer) = peer.stream.into_split();
        let reader = TimedReader {
            stream,
            silence,
            timeout: Box::pin(sleep(silence)),
        };
        Self {
            reader: StreamReader::new(FramedRead::new(reader, AuthorityDecoder::new())),
            writer,
            _slot: peer.slot,
        }
    }
}

/// The reading half of a connection. A read fails if nothing arrives for the time `silence`.
struct TimedReader {
    stream: OwnedReadHalf,
    silence: Duration,
    timeout: Pin<Box<Sleep>>,
}

impl AsyncRead for TimedReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, buf) {
            let until = Instant::now() + self.silence;
            self.timeout.as_mut().reset(until);
            return Poll::Ready(read);
        }
        ready!(self.timeout.as_mut().poll(cx));
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
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.reader).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.writer).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.writer).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.writer).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use prometheus::IntGauge;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::UnixStream;

    use super::*;
    use crate::unix::Socket;

    #[tokio::test]
    async fn a_connection_is_closed_after_a_silence_and_not_while_bytes_arrive() {
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
        assert_eq!(open.get(), 0, "its slot is free");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
