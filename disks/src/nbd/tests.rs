//! Tests using our own server, and scripted servers.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

use riser_block::poll_fds::PollInterests;
use riser_block::task::{block_on, join_all};
use riser_block::{
    BlockDevice, BlockError, Buffer, ByteDevice, Extent, ExtentKind, MAX_TRANSFER, MemoryDevice,
    Operation, Service, ServiceStatus, ZeroOptions,
};
use riser_exports::nbd::proto::{self, cmd, cmd_flag, info, opt, rep};
use riser_exports::nbd::{Server, ServerHandle};

use super::*;
use crate::testing::List;

const CONFIG: NbdConfig = NbdConfig {
    connect: Duration::from_secs(20),
    operation: Duration::from_secs(20),
    read_only: false,
    buffers: crate::BUFFERS,
};

const SIZE: u64 = 8 << 20;

fn socket_path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("riser-disks-{}-{number}", std::process::id()))
}

fn uri(path: &std::path::Path, export: &str) -> NbdUri {
    NbdUri {
        server: NbdServer::Unix(path.to_owned()),
        export: export.to_owned(),
    }
}

/// In-memory disk exported by our own server, with a client.
struct Bed {
    memory: Arc<MemoryDevice>,
    server: ServerHandle,
    disk: Arc<ThreadDisk>,
}

fn bed(change: impl FnOnce(&mut Geometry)) -> Bed {
    let memory = MemoryDevice::new(SIZE, 512).unwrap();
    let memory = Arc::new(memory.with_geometry(change).with_thread().unwrap());
    let path = socket_path();
    let bytes = Arc::new(ByteDevice::new(memory.clone()));
    let server = Server::bind(&path, bytes, "disk", "").unwrap();
    let server = server.start().unwrap();
    let disk = connect(&uri(&path, "disk"), CONFIG).unwrap();
    Bed {
        memory,
        server,
        disk: Arc::new(disk),
    }
}

fn filled(disk: &ThreadDisk, len: usize, byte: u8) -> Buffer {
    let buffer = block_on(disk.buffer(len));
    buffer.slice().fill(0, len, byte);
    buffer
}

#[test]
fn operations_reach_disk() {
    let Bed {
        memory,
        server,
        disk,
    } = bed(|_| {});
    let geometry = disk.geometry();
    assert_eq!((geometry.capacity, geometry.block_size), (SIZE, 512));
    assert!(geometry.reports_status && geometry.volatile_cache && !geometry.read_only);
    let at = 1 << 20;
    let buffer = filled(&disk, 300 << 10, 0xab);
    block_on(BlockDevice::write(&*disk, at, buffer, false)).unwrap();
    let mut byte = [0; 2];
    memory.memory().read(at as usize, &mut byte[..1]);
    memory
        .memory()
        .read(at as usize + (300 << 10) - 1, &mut byte[1..]);
    assert_eq!(byte, [0xab; 2]);
    let buffer = filled(&disk, 400 << 10, 1);
    let buffer = block_on(BlockDevice::read(&*disk, at, buffer)).unwrap();
    let got = buffer.slice().to_vec();
    assert!(got[..300 << 10].iter().all(|b| *b == 0xab));
    assert!(got[300 << 10..].iter().all(|b| *b == 0));
    drop(buffer);

    let before = memory.flushes();
    block_on(BlockDevice::flush(&*disk)).unwrap();
    assert_eq!(memory.flushes(), before + 1);
    block_on(BlockDevice::discard(&*disk, at..at + 65536)).unwrap();
    let options = ZeroOptions {
        fua: true,
        ..ZeroOptions::default()
    };
    let zeroed = at + 65536..at + 2 * 65536;
    block_on(BlockDevice::write_zeroes(&*disk, zeroed, options)).unwrap();
    assert!(memory.flushes() > before + 1);
    let extents = block_on(BlockDevice::status(&*disk, at - 65536..at + (320 << 10))).unwrap();
    let total: u64 = extents.iter().map(|e| e.len).sum();
    assert_eq!(total, 384 << 10);
    let first = Extent {
        len: 2 * 65536,
        kind: ExtentKind::Hole,
    };
    assert_eq!(extents[0], first, "{extents:?}");
    let buffer = block_on(BlockDevice::read(&*disk, at, filled(&disk, 131_072, 1))).unwrap();
    assert!(buffer.slice().to_vec().iter().all(|b| *b == 0));
    disk.close();
    let late = block_on(BlockDevice::read(&*disk, 0, buffer)).unwrap_err();
    assert!(matches!(late, BlockError::Disconnected(_)), "{late}");
    server.stop().unwrap();
}

#[test]
fn disk_has_configured_buffer_size() {
    for (buffers, want) in [(96 << 20, 96 << 20), (0, u64::from(MAX_TRANSFER))] {
        let (path, thread) = scripted(SIZE, |socket| serve_requests(socket, 0));
        let disk = connect(&uri(&path, "disk"), NbdConfig { buffers, ..CONFIG }).unwrap();
        assert_eq!(disk.buffer_bytes(), want);
        drop(disk);
        thread.join().unwrap();
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn concurrent_operations_match_their_replies() {
    let Bed { disk, server, .. } = bed(|_| {});
    // Use many lengths, so that some replies are received directly and some are copied.
    let length = |n: u64| 512 << (n % 9);
    for round in 0..3u64 {
        let writes = (0..48u64).map(|n| {
            let disk = disk.clone();
            async move {
                let buffer = disk.buffer(length(n)).await;
                buffer.slice().fill(0, buffer.len(), (n + round) as u8);
                BlockDevice::write(&*disk, n * (128 << 10), buffer, n % 7 == 0).await
            }
        });
        assert!(block_on(join_all(writes)).iter().all(Result::is_ok));
        let reads = (0..48u64).map(|n| {
            let disk = disk.clone();
            async move {
                let buffer = disk.buffer(length(n)).await;
                BlockDevice::read(&*disk, n * (128 << 10), buffer).await
            }
        });
        for (n, read) in block_on(join_all(reads)).into_iter().enumerate() {
            let bytes = read.unwrap().slice().to_vec();
            let want = (n as u64 + round) as u8;
            assert!(bytes.iter().all(|b| *b == want), "read {n}");
        }
    }
    drop(disk);
    server.stop().unwrap();
}

#[test]
fn server_error_fails_single_operation() {
    let Bed {
        memory,
        disk,
        server,
    } = bed(|_| {});
    memory.spoil(4096..8192);
    let error = block_on(BlockDevice::read(&*disk, 4096, filled(&disk, 512, 0))).unwrap_err();
    assert!(
        matches!(&error, BlockError::Io(why) if why.contains("error 5")),
        "{error}"
    );
    let write = BlockDevice::write(&*disk, 4096, filled(&disk, 512, 0), false);
    assert!(matches!(block_on(write), Err(BlockError::Io(_))));
    block_on(BlockDevice::read(&*disk, 0, filled(&disk, 512, 0))).unwrap();
    for (offset, len) in [(SIZE, 512), (SIZE - 512, 1024), (100, 512), (0, 100)] {
        let read = BlockDevice::read(&*disk, offset, filled(&disk, len, 0));
        assert_eq!(block_on(read).unwrap_err(), BlockError::OutOfRange);
    }
    drop(disk);
    server.stop().unwrap();

    let Bed { disk, server, .. } = bed(|geometry| geometry.read_only = true);
    assert!(disk.geometry().read_only);
    let write = BlockDevice::write(&*disk, 0, filled(&disk, 512, 0), false);
    assert_eq!(block_on(write).unwrap_err(), BlockError::ReadOnly);
    let discard = BlockDevice::discard(&*disk, 0..512);
    assert_eq!(block_on(discard).unwrap_err(), BlockError::ReadOnly);
    drop(disk);
    server.stop().unwrap();
}

#[test]
fn server_disconnect_fails_all_operations() {
    let Bed { disk, server, .. } = bed(|_| {});
    let reader = disk.clone();
    let (started, has_started) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut number = 0;
        loop {
            let buffer = filled(&reader, 4096, 0);
            match block_on(BlockDevice::read(&*reader, 0, buffer)) {
                Ok(_) if number == 0 => started.send(()).unwrap(),
                Ok(_) => {}
                Err(error) => return error,
            }
            number += 1;
        }
    });
    has_started.recv().unwrap();
    server.stop().unwrap();
    let error = thread.join().unwrap();
    assert!(matches!(error, BlockError::Disconnected(_)), "{error}");
    let flush = block_on(BlockDevice::flush(&*disk));
    assert!(matches!(flush, Err(BlockError::Disconnected(_))));
}

/// Sequential reads on the disk thread.
struct Reader {
    disk: Arc<ThreadDisk>,
    done: std::sync::mpsc::Sender<String>,
}

impl Service for Reader {
    fn run_once(&mut self) -> ServiceStatus {
        let (disk, done) = (self.disk.clone(), self.done.clone());
        riser_block::task::spawn(async move {
            for n in 0..100 {
                let buffer = disk.buffer(4096).await;
                BlockDevice::read(&*disk, n * 4096, buffer).await.unwrap();
                let name = std::thread::current().name().unwrap().to_owned();
                done.send(name).unwrap();
            }
        });
        ServiceStatus::Over
    }

    fn prepare_sleep(&mut self) -> bool {
        true
    }

    fn add_interests<'a>(&'a self, _: &mut PollInterests<'a>) {}

    fn end_sleep(&mut self) {}
}

#[test]
fn hosted_client_stays_on_disk_thread() {
    let Bed { disk, server, .. } = bed(|_| {});
    let (done, names) = std::sync::mpsc::channel();
    let reader = Reader {
        disk: disk.clone(),
        done,
    };
    assert!(disk.host(Box::new(reader)).is_ok());
    let names: Vec<_> = names.iter().collect();
    assert_eq!(names, vec!["nbd-disk"; 100]);
    disk.close();
    let (done, _names) = std::sync::mpsc::channel();
    let late = Reader {
        disk: disk.clone(),
        done,
    };
    assert!(disk.host(Box::new(late)).is_err());
    server.stop().unwrap();
}

#[test]
fn workload_runs_on_disk_thread() {
    let Bed { disk, server, .. } = bed(|_| {});
    let at = |n: u64| n * 65536;
    let write = |n: u64| Operation::Write {
        offset: at(n),
        buffer: filled(&disk, 4096 << (n % 3), n as u8 + 1),
        fua: n.is_multiple_of(5),
    };
    let (list, seen) = List::new((0..40).map(write), 8);
    assert!(disk.drive(list).is_ok());
    // The receiver is closed when the workload is done.
    let mut tags: Vec<u32> = Vec::new();
    for seen in seen {
        assert_eq!(seen.thread, "nbd-disk");
        assert!(seen.completion.unwrap().is_some());
        tags.push(seen.tag);
    }
    tags.sort_unstable();
    assert!(tags.into_iter().eq(0..40));
    let read = |n: u64| Operation::Read {
        offset: at(n),
        buffer: filled(&disk, 4096 << (n % 3), 0),
    };
    let (list, seen) = List::new((0..40).map(read), 8);
    assert!(disk.drive(list).is_ok());
    for seen in seen {
        let bytes = seen.completion.unwrap().unwrap().slice().to_vec();
        assert!(bytes.iter().all(|b| u32::from(*b) == seen.tag + 1));
    }
    drop(disk);
    server.stop().unwrap();
}

#[test]
fn workload_operations_respect_disk_limits() {
    let Bed { disk, server, .. } = bed(|_| {});
    let read = |offset, len| Operation::Read {
        offset,
        buffer: filled(&disk, len, 0),
    };
    let operations = [
        read(SIZE, 512),
        read(100, 512),
        read(0, 0),
        Operation::Discard(0..SIZE + 512),
        Operation::Discard(512..512),
        Operation::Flush,
        read(0, 512),
    ];
    let (list, seen) = List::new(operations, 1);
    assert!(disk.drive(list).is_ok());
    let found: Vec<_> = seen.iter().map(|seen| seen.completion.is_ok()).collect();
    assert_eq!(found, [false, false, true, false, true, true, true]);
    drop(disk);
    server.stop().unwrap();
}

#[test]
fn workload_timers_stop_with_disk() {
    let Bed {
        memory,
        disk,
        server,
    } = bed(|_| {});
    let flushes = (0..5).map(|_| Operation::Flush);
    let before = memory.flushes();
    let (list, seen) = List::timed(flushes, Duration::from_millis(2));
    assert!(disk.drive(list).is_ok());
    assert_eq!(seen.iter().count(), 5);
    assert_eq!(memory.flushes(), before + 5);
    // The first flush has completed, and the other flushes are planned.
    let flushes = (0..5).map(|_| Operation::Flush);
    let (list, seen) = List::timed(flushes, Duration::from_secs(3600));
    assert!(disk.drive(list).is_ok());
    seen.recv().unwrap().completion.unwrap();
    disk.close();
    assert!(seen.recv().is_err(), "it is dropped");
    let (list, _seen) = List::new([Operation::Flush], 1);
    assert!(disk.drive(list).is_err(), "it is given back");
    server.stop().unwrap();
}

/// Reads a request header: flags, type, cookie and length.
fn request(socket: &mut std::os::unix::net::UnixStream) -> (u16, u16, proto::Cookie, u32) {
    let mut header = [0; 28];
    socket.read_exact(&mut header).unwrap();
    let short = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let cookie = u64::from_be_bytes(*header[8..].first_chunk().unwrap());
    let len = u32::from_be_bytes(*header[24..].first_chunk().unwrap());
    (short(4), short(6), proto::Cookie(cookie), len)
}

/// Replies to a number of requests. Returns their types and flags.
fn serve_requests(mut socket: std::os::unix::net::UnixStream, count: usize) -> Vec<(u16, u16)> {
    let mut seen = Vec::new();
    for _ in 0..count {
        let (flags, command, cookie, len) = request(&mut socket);
        if command == cmd::WRITE {
            socket.read_exact(&mut vec![0; len as usize]).unwrap();
        }
        let reply = proto::simple_reply(cookie, None);
        socket.write_all(&reply).unwrap();
        seen.push((command, flags));
    }
    // Wait until the client disconnects.
    let _ = socket.read_to_end(&mut Vec::new());
    seen
}

#[test]
fn fua_write_flushes_without_server_fua() {
    let (path, thread) = scripted(SIZE, |socket| serve_requests(socket, 4));
    let disk = connect(&uri(&path, "disk"), CONFIG).unwrap();
    let write = || Operation::Write {
        offset: 0,
        buffer: filled(&disk, 4096, 1),
        fua: true,
    };
    let (list, seen) = List::new([write()], 1);
    assert!(disk.drive(list).is_ok());
    let buffer = seen.recv().unwrap().completion.unwrap();
    assert_eq!(buffer.expect("it comes back").len(), 4096);
    block_on(BlockDevice::write(&disk, 0, filled(&disk, 4096, 1), true)).unwrap();
    drop(disk);
    let both = [(cmd::WRITE, 0), (cmd::FLUSH, 0)];
    assert_eq!(thread.join().unwrap(), [both, both].concat());
    std::fs::remove_file(path).unwrap();
}

#[test]
fn fua_zeroes_work_without_server_flush() {
    let flags = proto::flag::SEND_FUA | proto::flag::SEND_WRITE_ZEROES;
    let (path, thread) = scripted_with(flags, SIZE, |socket| serve_requests(socket, 2));
    let disk = connect(&uri(&path, "disk"), CONFIG).unwrap();
    for fua in [true, false] {
        let options = ZeroOptions {
            may_unmap: true,
            fua,
            fast: false,
        };
        block_on(BlockDevice::write_zeroes(&disk, 0..4096, options)).unwrap();
    }
    drop(disk);
    let zeroes = cmd::WRITE_ZEROES;
    let want = [(zeroes, cmd_flag::FUA), (zeroes, 0)];
    assert_eq!(thread.join().unwrap(), want);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn rejected_zeroes_use_no_pool_buffer() {
    let flags = proto::flag::SEND_FLUSH | proto::flag::SEND_WRITE_ZEROES;
    let (path, thread) = scripted_with(flags, SIZE, |mut socket| {
        let mut written = Vec::new();
        for _ in 0..4 {
            let (_, command, cookie, len) = request(&mut socket);
            let refusal = (command == cmd::WRITE_ZEROES).then_some(proto::Errno::NotSup);
            if command == cmd::WRITE {
                let mut data = vec![1; len as usize];
                socket.read_exact(&mut data).unwrap();
                written.push(data);
            }
            socket
                .write_all(&proto::simple_reply(cookie, refusal))
                .unwrap();
        }
        let _ = socket.read_to_end(&mut Vec::new());
        written.concat()
    });
    let disk = Arc::new(connect(&uri(&path, "disk"), CONFIG).unwrap());
    let held: Vec<Buffer> = std::iter::from_fn(|| disk.try_buffer(512)).collect();
    let fast = ZeroOptions {
        fast: true,
        ..ZeroOptions::default()
    };
    let zeroed = block_on(BlockDevice::write_zeroes(&*disk, 0..4096, fast));
    assert_eq!(zeroed, Err(BlockError::Unsupported));
    let (done, ended) = std::sync::mpsc::channel();
    let zeroing = disk.clone();
    std::thread::spawn(move || {
        let zeroes = BlockDevice::write_zeroes(&*zeroing, 0..400 << 10, ZeroOptions::default());
        let _ = done.send(block_on(zeroes));
    });
    let zeroed = ended.recv_timeout(Duration::from_secs(60));
    assert_eq!(zeroed, Ok(Ok(())), "it waits for a buffer");
    drop((disk, held));
    assert!(thread.join().unwrap() == vec![0; 400 << 10]);
    std::fs::remove_file(path).unwrap();
}

/// Same as [`scripted_with`], with flush support.
fn scripted<T: Send + 'static>(
    size: u64,
    serve: impl FnOnce(std::os::unix::net::UnixStream) -> T + Send + 'static,
) -> (PathBuf, JoinHandle<T>) {
    scripted_with(proto::flag::SEND_FLUSH, size, serve)
}

/// Serves a single client using a script: it gets the socket after negotiation, without structured
/// replies.
fn scripted_with<T: Send + 'static>(
    flags: u16,
    size: u64,
    serve: impl FnOnce(std::os::unix::net::UnixStream) -> T + Send + 'static,
) -> (PathBuf, JoinHandle<T>) {
    let path = socket_path();
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut bytes = proto::NBD_MAGIC.to_be_bytes().to_vec();
        bytes.extend(proto::OPTION_MAGIC.to_be_bytes());
        bytes.extend(3u16.to_be_bytes());
        let mut reply = |option: u32, kind: u32, data: &[u8]| {
            bytes.extend(proto::OPTION_REPLY_MAGIC.to_be_bytes());
            for number in [option, kind, data.len() as u32] {
                bytes.extend(number.to_be_bytes());
            }
            bytes.extend(data);
        };
        reply(opt::STRUCTURED_REPLY, rep::ERR_UNSUP, &[]);
        let mut export = info::EXPORT.to_be_bytes().to_vec();
        export.extend(size.to_be_bytes());
        let flags = proto::flag::HAS_FLAGS | flags;
        export.extend(flags.to_be_bytes());
        reply(opt::GO, rep::INFO, &export);
        reply(opt::GO, rep::ACK, &[]);
        socket.write_all(&bytes).unwrap();
        // Flags, an option without data, and an option with the name and one info request.
        let mut room = [0; 4 + 16 + 16 + 4 + 4 + 2 + 2];
        socket.read_exact(&mut room).unwrap();
        serve(socket)
    });
    (path, thread)
}

#[test]
fn protocol_violation_closes_disk_with_reason() {
    let (path, thread) = scripted(SIZE, |mut socket| {
        let mut request = [0; 28];
        socket.read_exact(&mut request).unwrap();
        socket.write_all(&[0x11; 16]).unwrap();
        // Wait until the client closes the connection.
        let _ = socket.read_to_end(&mut Vec::new());
    });
    let disk = connect(&uri(&path, "disk"), CONFIG).unwrap();
    let error = block_on(BlockDevice::read(&disk, 0, filled(&disk, 512, 0))).unwrap_err();
    assert!(
        error.to_string().contains("invalid magic 0x11111111"),
        "{error}"
    );
    let again = block_on(BlockDevice::flush(&disk)).unwrap_err();
    assert_eq!(error, again);
    thread.join().unwrap();
    std::fs::remove_file(path).unwrap();
}

#[test]
fn silent_server_times_out() {
    let (path, thread) = scripted(SIZE, |mut socket| {
        let _ = socket.read_to_end(&mut Vec::new());
    });
    let config = NbdConfig {
        operation: Duration::from_millis(30),
        ..CONFIG
    };
    let disk = connect(&uri(&path, "disk"), config).unwrap();
    let error = block_on(BlockDevice::flush(&disk)).unwrap_err();
    assert_eq!(error, BlockError::TimedOut);
    thread.join().unwrap();
    std::fs::remove_file(path).unwrap();

    // The timeout should also apply during negotiation.
    let path = socket_path();
    let listener = UnixListener::bind(&path).unwrap();
    let config = NbdConfig {
        connect: Duration::from_millis(30),
        ..CONFIG
    };
    let error = connect(&uri(&path, "disk"), config).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    drop(listener);
    let error = connect(&uri(&path, "disk"), config).unwrap_err();
    assert!(matches!(error, NbdError::Connect(_)), "{error}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn full_listen_queue_times_out() {
    use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    let path = socket_path();
    let listener = UnixListener::bind(&path).unwrap();
    net::listen(&listener, 0).unwrap();
    let address = SocketAddrUnix::new(path.as_path()).unwrap();
    let mut waiting = Vec::new();
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.unwrap();
        match net::connect(&socket, &address) {
            Ok(()) => waiting.push(socket),
            Err(error) => {
                assert_eq!(error, rustix::io::Errno::AGAIN);
                break;
            }
        }
    }
    let config = NbdConfig {
        connect: Duration::from_millis(30),
        ..CONFIG
    };
    let error = connect(&uri(&path, "disk"), config).unwrap_err();
    assert!(matches!(error, NbdError::Connect(_)), "{error}");
    assert!(error.is_timeout(), "{error}");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn close_sends_disconnect() {
    let (path, thread) = scripted(SIZE, |mut socket| {
        let mut bytes = Vec::new();
        socket.read_to_end(&mut bytes).unwrap();
        bytes
    });
    connect(&uri(&path, "disk"), CONFIG).unwrap().close();
    let bytes = thread.join().unwrap();
    let disconnect = proto::request_header(proto::cmd::DISC, 0, proto::Cookie(0), 0, 0);
    assert_eq!(bytes, disconnect);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn partial_last_block_is_ignored() {
    let (path, thread) = scripted(1000, drop);
    let disk = connect(&uri(&path, "disk"), CONFIG).unwrap();
    assert_eq!(disk.geometry().capacity, 512);
    thread.join().unwrap();
    std::fs::remove_file(path).unwrap();
}

#[test]
fn export_below_block_size_fails() {
    for size in [0, 511] {
        let (path, thread) = scripted(size, drop);
        let error = connect(&uri(&path, "disk"), CONFIG).unwrap_err();
        assert!(matches!(error, NbdError::Size { .. }), "{error}");
        thread.join().unwrap();
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn silent_address_leaves_time_for_next() {
    let full = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::listen(&full, 1).unwrap();
    let silent = full.local_addr().unwrap();
    // The kernel drops new connections if there are already two waiting to be accepted.
    let _waiting = [(); 2].map(|()| TcpStream::connect(silent).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = listener.local_addr().unwrap();
    let until = Instant::now() + Duration::from_secs(4);
    let socket = connect_tcp(&[silent, other], until).unwrap();
    assert_eq!(socket.peer_addr().unwrap(), other);
    let until = Instant::now() + Duration::from_millis(100);
    let error = connect_tcp(&[silent, silent], until).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
}

#[test]
fn disk_connects_over_tcp() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let thread = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        socket.write_all(b"220 mail.example ESMTP\r\n").unwrap();
        let _ = socket.read_to_end(&mut Vec::new());
    });
    let uri: NbdUri = format!("nbd://127.0.0.1:{port}/disk").parse().unwrap();
    let error = connect(&uri, CONFIG).unwrap_err().to_string();
    assert!(error.contains("not an NBD server"), "{error}");
    thread.join().unwrap();
    let error = connect(&uri, CONFIG).unwrap_err();
    assert!(matches!(error, NbdError::Connect(_)), "{error}");
    let uri: NbdUri = "nbd://host.invalid/disk".parse().unwrap();
    let error = connect(&uri, CONFIG).unwrap_err();
    assert!(matches!(error, NbdError::Resolve { .. }), "{error}");
}
