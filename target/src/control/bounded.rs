//! A listener for HTTP that whoever reaches its address may use: so many connections at once and no
//! more, and none of them idle for long. Others wait in the kernel's backlog.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_io_timeout::TimeoutStream;

/// Accepts connections while there are fewer than so many.
pub(super) struct Bounded {
    listener: TcpListener,
    free: Arc<Semaphore>,
    idle: Duration,
}

impl Bounded {
    /// So many connections, each of which may be silent for so long.
    pub(super) fn new(listener: TcpListener, connections: usize, idle: Duration) -> Self {
        Self {
            listener,
            free: Arc::new(Semaphore::new(connections)),
            idle,
        }
    }
}

impl Listener for Bounded {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let free = Arc::clone(&self.free);
        let place = free.acquire_owned().await.expect("it is never closed");
        let (stream, peer) = Listener::accept(&mut self.listener).await;
        let mut stream = TimeoutStream::new(stream);
        stream.set_read_timeout(Some(self.idle));
        stream.set_write_timeout(Some(self.idle));
        let stream = Box::pin(stream);
        (
            Connection {
                stream,
                _place: place,
            },
            peer,
        )
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection, and its place among those there may be.
pub(super) struct Connection {
    stream: Pin<Box<TimeoutStream<TcpStream>>>,
    _place: OwnedSemaphorePermit,
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.stream.as_mut().poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::routing::{MethodFilter, on};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Those that come first and say nothing keep others waiting, but not for ever.
    #[test]
    fn silent_connections_make_room() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let addr = listener.local_addr().unwrap();
            let bounded = Bounded::new(listener, 2, Duration::from_millis(200));
            let router = Router::new().route("/", on(MethodFilter::GET, async || "here"));
            tokio::spawn(std::future::IntoFuture::into_future(axum::serve(
                bounded, router,
            )));
            let mut silent = Vec::new();
            for _ in 0..2 {
                silent.push(TcpStream::connect(addr).await.unwrap());
            }
            let mut talker = TcpStream::connect(addr).await.unwrap();
            let request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
            talker.write_all(request).await.unwrap();
            let mut answer = String::new();
            talker.read_to_string(&mut answer).await.unwrap();
            assert!(answer.ends_with("here"), "{answer}");
            // One of the two had to go for it.
            let mut rest = Vec::new();
            let gone = silent[0].read_to_end(&mut rest).await;
            assert!(gone.is_ok_and(|n| n == 0) && rest.is_empty());
        });
    }
}
