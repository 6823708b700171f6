//! HTTP listener that protects its clients from each other, even if some of them are slow.
//!
//! Each connection has a timeout to send its request, to read the response, and between two
//! requests. When the table is full, a new connection replaces an existing connection: we select
//! the origin with most connections, and then the connection with the oldest response. Connections
//! with a pending request are selected last.
//!
//! ```text
//! accepted ─→ Request ─first byte written─→ Response ─all written─→ Idle ─first byte read─→ Request
//! ```

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream, unix};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, Sleep, sleep};

/// Connection limits of a listener.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Maximum number of connections.
    pub(super) connections: usize,
    /// Timeout for a whole request. This does not include the time to process it.
    pub(super) request: Duration,
    /// Timeout for the client to read a whole response.
    pub(super) response: Duration,
    /// Idle timeout between two requests.
    pub(super) idle: Duration,
}

/// Origin of connections from the same client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    /// A remote host by address.
    Address(IpAddr),
    /// A local user, if known by the kernel.
    User(Option<u32>),
}

/// A listener that can return the origin of its connections.
pub(super) trait Source: Listener {
    /// Returns the origin of a connection.
    fn origin(io: &Self::Io, addr: &Self::Addr) -> Origin;
}

impl Source for TcpListener {
    fn origin(_: &TcpStream, addr: &SocketAddr) -> Origin {
        // Treat an IPv4 client as the same origin, even if it uses an IPv6 socket.
        Origin::Address(addr.ip().to_canonical())
    }
}

impl Source for UnixListener {
    fn origin(io: &UnixStream, _: &unix::SocketAddr) -> Origin {
        Origin::User(io.peer_cred().ok().map(|peer| peer.uid()))
    }
}

/// A connection in the table.
#[derive(Debug)]
struct Entry {
    origin: Origin,
    /// Time when it was accepted, or when the last response was sent.
    since: Instant,
    /// Number of requests being processed.
    working: usize,
    /// Closes the connection. `None` if the connection has been replaced.
    displace: Option<oneshot::Sender<()>>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    entries: BTreeMap<u64, Entry>,
}

impl Table {
    /// Returns the connection that should be replaced by a new connection.
    fn victim(&mut self) -> Option<&mut Entry> {
        let mut counts = BTreeMap::<Origin, usize>::new();
        for entry in self.entries.values() {
            *counts.entry(entry.origin).or_default() += 1;
        }
        let staying = self.entries.values_mut().filter(|e| e.displace.is_some());
        staying.min_by_key(|e| (e.working > 0, Reverse(counts[&e.origin]), e.since))
    }
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reference to a connection in the table.
#[derive(Clone, Debug)]
pub(super) struct TableEntry {
    table: Arc<Mutex<Table>>,
    id: u64,
}

impl TableEntry {
    /// Marks a complete request of this connection as being processed until the result is dropped.
    pub(super) fn work(&self) -> Working {
        self.with(|entry| entry.working += 1);
        Working(self.clone())
    }

    fn is_working(&self) -> bool {
        let table = lock(&self.table);
        table.entries.get(&self.id).is_some_and(|e| e.working > 0)
    }

    /// Note that the entry may have been removed already.
    fn with(&self, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = lock(&self.table).entries.get_mut(&self.id) {
            change(entry);
        }
    }
}

/// A request being processed.
#[derive(Debug)]
pub(super) struct Working(TableEntry);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.with(|entry| entry.working -= 1);
    }
}

/// Listener with a limited number of connections.
pub(super) struct Bounded<L> {
    listener: L,
    limits: Limits,
    free: Arc<Semaphore>,
    table: Arc<Mutex<Table>>,
}

impl<L> Bounded<L> {
    /// Creates a listener with these limits.
    pub(super) fn new(listener: L, limits: Limits) -> Self {
        Self {
            listener,
            limits,
            free: Arc::new(Semaphore::new(limits.connections)),
            table: Arc::default(),
        }
    }
}

/// Returns a permit. If none is available, we close another connection.
async fn permit(free: Arc<Semaphore>, table: &Mutex<Table>) -> OwnedSemaphorePermit {
    // The new connection wins. So a client with many idle connections will lose its own connections
    // first, and cannot lock out other clients.
    if free.available_permits() == 0 {
        let victim = lock(table).victim().and_then(|e| e.displace.take());
        if let Some(displace) = victim {
            // The connection may be closing already.
            let _ = displace.send(());
        }
    }
    free.acquire_owned().await.expect("it is never closed")
}

impl<L: Source> Listener for Bounded<L> {
    type Io = Connection<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Connection<L::Io>, L::Addr) {
        let (stream, addr) = self.listener.accept().await;
        // We must wait for this before the next accept, so that the number of descriptors is
        // limited as well.
        let permit = permit(Arc::clone(&self.free), &self.table).await;
        let (displace, displaced) = oneshot::channel();
        let mut table = lock(&self.table);
        let id = table.next;
        table.next += 1;
        let entry = Entry {
            origin: L::origin(&stream, &addr),
            since: Instant::now(),
            working: 0,
            displace: Some(displace),
        };
        table.entries.insert(id, entry);
        // Unlock before creating the `Connection`, because its `Drop` needs the same lock.
        drop(table);
        let table = Arc::clone(&self.table);
        let connection = Connection {
            stream,
            limits: self.limits,
            phase: Phase::Request,
            timer: Box::pin(sleep(self.limits.request)),
            displaced: Some(displaced),
            entry: TableEntry { table, id },
            _permit: permit,
        };
        (connection, addr)
    }

    fn local_addr(&self) -> io::Result<L::Addr> {
        self.listener.local_addr()
    }
}

/// Connection phase, which selects the timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The request is incomplete, or is being processed.
    Request,
    /// The response is being sent.
    Response,
    /// All responses have been sent.
    Idle,
}

/// A connection with timeouts.
pub(super) struct Connection<S> {
    stream: S,
    limits: Limits,
    phase: Phase,
    timer: Pin<Box<Sleep>>,
    /// `None` if the connection has been replaced.
    displaced: Option<oneshot::Receiver<()>>,
    entry: TableEntry,
    _permit: OwnedSemaphorePermit,
}

impl<S> Connection<S> {
    /// Returns the underlying stream.
    pub(super) fn stream(&self) -> &S {
        &self.stream
    }

    /// Returns the table entry of this connection.
    pub(super) fn entry(&self) -> &TableEntry {
        &self.entry
    }

    fn change_phase(&mut self, phase: Phase) {
        // The timeout is for the whole phase, so a client must not be able to extend it by reading
        // one byte at a time.
        if std::mem::replace(&mut self.phase, phase) == phase {
            return;
        }
        let now = Instant::now();
        let time = match phase {
            Phase::Request => self.limits.request,
            Phase::Response => self.limits.response,
            Phase::Idle => {
                self.entry.with(|entry| entry.since = now);
                self.limits.idle
            }
        };
        self.timer.as_mut().reset(now + time);
    }

    /// Fails if the connection should be closed. Otherwise, the task will be woken up when the
    /// timeout expires.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let displaced = self.displaced.as_mut();
        // This is also ready if the sender was dropped together with the table entry.
        if displaced.is_none_or(|displaced| Pin::new(displaced).poll(cx).is_ready()) {
            self.displaced = None;
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            // While a request is being processed, the client is waiting for us, so we don't need a
            // timeout.
            if self.phase == Phase::Response || !self.entry.is_working() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let next = Instant::now() + self.limits.request;
            self.timer.as_mut().reset(next);
        }
        Ok(())
    }
}

impl<S> Drop for Connection<S> {
    fn drop(&mut self) {
        lock(&self.entry.table).entries.remove(&self.entry.id);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.check(cx)?;
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        // While we send a response, receiving the next request must not extend the timeout to read
        // this response.
        if this.phase == Phase::Idle && buf.filled().len() > before {
            this.change_phase(Phase::Request);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.change_phase(Phase::Response);
        this.check(cx)?;
        Pin::new(&mut this.stream).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.check(cx)?;
        ready!(Pin::new(&mut this.stream).poll_flush(cx))?;
        // We can only change the phase after a complete flush, because some bytes of the response
        // may still be buffered.
        if this.phase == Phase::Response {
            this.change_phase(Phase::Idle);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.check(cx)?;
        Pin::new(&mut this.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::IntoFuture;

    use axum::Router;
    use axum::extract::ConnectInfo;
    use axum::extract::connect_info::Connected;
    use axum::routing::{MethodFilter, on};
    use axum::serve::IncomingStream;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpSocket;
    use tokio::sync::Notify;
    use tokio::time::timeout;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);
    const SHORT: Duration = Duration::from_millis(200);
    /// Much longer than any step in these tests.
    const PATIENCE: Duration = Duration::from_secs(60);

    const LIMITS: Limits = Limits {
        connections: 2,
        request: LONG,
        response: LONG,
        idle: LONG,
    };

    /// More data than sockets can buffer.
    const MUCH: usize = 64 << 20;

    #[derive(Clone)]
    struct Client(TableEntry);

    impl Connected<IncomingStream<'_, Bounded<TcpListener>>> for Client {
        fn connect_info(stream: IncomingStream<'_, Bounded<TcpListener>>) -> Self {
            Self(stream.io().entry().clone())
        }
    }

    /// Runs a test with a server, where `/work` is processed until it is notified.
    fn test<T: Future<Output = ()>>(
        limits: Limits,
        test: impl FnOnce(SocketAddr, Arc<Notify>) -> T,
    ) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let addr = listener.local_addr().unwrap();
            let done = Arc::new(Notify::new());
            let awaited = Arc::clone(&done);
            let work = async move |ConnectInfo(Client(entry)): ConnectInfo<Client>| {
                let _working = entry.work();
                awaited.notified().await;
                "done"
            };
            let router = Router::new()
                .route("/", on(MethodFilter::GET, async || "here"))
                .route("/much", on(MethodFilter::GET, async || "x".repeat(MUCH)))
                .route("/work", on(MethodFilter::GET, work))
                .into_make_service_with_connect_info::<Client>();
            let bounded = Bounded::new(listener, limits);
            tokio::spawn(axum::serve(bounded, router).into_future());
            timeout(PATIENCE, test(addr, done)).await.unwrap();
        });
    }

    async fn connect_from(source: &str, addr: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{source}:0").parse().unwrap()).unwrap();
        socket.connect(addr).await.unwrap()
    }

    async fn send_request(stream: &mut TcpStream, path: &str) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
    }

    /// Reads a response until these words are received.
    async fn read_until(stream: &mut TcpStream, words: &str) {
        let mut received = String::new();
        while !received.ends_with(words) {
            let mut bytes = [0; 1024];
            let n = stream.read(&mut bytes).await.unwrap();
            assert!(n > 0, "ended after {received:?}");
            received.push_str(std::str::from_utf8(&bytes[..n]).unwrap());
        }
    }

    /// Waits until the server has closed a connection, and discards any received data.
    async fn ended(mut stream: TcpStream) {
        let mut bytes = vec![0; 1 << 16];
        while stream.read(&mut bytes).await.is_ok_and(|n| n > 0) {}
    }

    #[test]
    fn new_connection_displaces_slow_request() {
        test(LIMITS, async |addr, _| {
            let mut slow = Vec::new();
            for _ in 0..LIMITS.connections {
                let mut stream = TcpStream::connect(addr).await.unwrap();
                stream.write_all(b"GET / HT").await.unwrap();
                slow.push(stream);
            }
            let mut other = TcpStream::connect(addr).await.unwrap();
            send_request(&mut other, "/").await;
            read_until(&mut other, "here").await;
            // The oldest connection should have been closed.
            ended(slow.remove(0)).await;
            slow[0]
                .write_all(b"TP/1.1\r\nHost: x\r\n\r\n")
                .await
                .unwrap();
            read_until(&mut slow[0], "here").await;
        });
    }

    #[test]
    fn new_connection_displaces_idle_reader() {
        test(LIMITS, async |addr, _| {
            let mut unread = Vec::new();
            for _ in 0..LIMITS.connections {
                let mut stream = TcpStream::connect(addr).await.unwrap();
                send_request(&mut stream, "/much").await;
                // The response has started.
                stream.read_exact(&mut [0; 4]).await.unwrap();
                unread.push(stream);
            }
            let mut other = TcpStream::connect(addr).await.unwrap();
            send_request(&mut other, "/").await;
            read_until(&mut other, "here").await;
        });
    }

    #[test]
    fn heaviest_user_loses_connection() {
        let limits = Limits {
            connections: 3,
            ..LIMITS
        };
        test(limits, async |addr, _| {
            let mut scraper = connect_from("127.0.0.2", addr).await;
            send_request(&mut scraper, "/").await;
            read_until(&mut scraper, "here").await;
            let mut many = Vec::new();
            for _ in 0..20 {
                let mut stream = connect_from("127.0.0.3", addr).await;
                send_request(&mut stream, "/").await;
                read_until(&mut stream, "here").await;
                many.push(stream);
            }
            send_request(&mut scraper, "/").await;
            read_until(&mut scraper, "here").await;
        });
    }

    #[test]
    fn active_request_is_displaced_last() {
        let limits = Limits {
            request: SHORT,
            ..LIMITS
        };
        test(limits, async |addr, done| {
            let mut worker = TcpStream::connect(addr).await.unwrap();
            send_request(&mut worker, "/work").await;
            tokio::time::sleep(2 * SHORT).await;
            for _ in 0..20 {
                let mut other = TcpStream::connect(addr).await.unwrap();
                send_request(&mut other, "/").await;
                read_until(&mut other, "here").await;
                send_request(&mut other, "/").await;
                read_until(&mut other, "here").await;
            }
            done.notify_one();
            read_until(&mut worker, "done").await;
        });
    }

    #[test]
    fn trickling_bytes_do_not_extend_request() {
        let limits = Limits {
            request: SHORT,
            ..LIMITS
        };
        test(limits, async |addr, _| {
            let mut slow = TcpStream::connect(addr).await.unwrap();
            send_request(&mut slow, "/").await;
            read_until(&mut slow, "here").await;
            // Send the second request of this connection as well.
            while slow.write_all(b"G").await.is_ok() {
                tokio::time::sleep(SHORT / 10).await;
            }
        });
    }

    #[test]
    fn slowly_read_response_times_out() {
        let limits = Limits {
            response: SHORT,
            ..LIMITS
        };
        test(limits, async |addr, _| {
            let mut slow = TcpStream::connect(addr).await.unwrap();
            send_request(&mut slow, "/much").await;
            let mut read = 0;
            let mut bytes = [0; 16];
            while let Ok(n @ 1..) = slow.read(&mut bytes).await {
                read += n;
                tokio::time::sleep(SHORT / 10).await;
                if read > 100 * bytes.len() {
                    // Only data buffered by sockets is left.
                    return ended(slow).await;
                }
            }
        });
    }

    #[test]
    fn idle_connection_is_closed() {
        let limits = Limits {
            idle: SHORT,
            ..LIMITS
        };
        test(limits, async |addr, _| {
            let mut idle = TcpStream::connect(addr).await.unwrap();
            send_request(&mut idle, "/").await;
            read_until(&mut idle, "here").await;
            ended(idle).await;
        });
    }
}
