//! Disks exported by third-party servers: `qemu-nbd` and `nbdkit`, over Unix sockets and TCP. If a
//! server is not installed, the test is skipped and the skip is counted.

#![allow(missing_docs, reason = "a test")]

use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use riser_block::task::block_on;
use riser_block::{BlockDevice, ExtentKind, ZeroOptions};
use riser_disks::nbd::{NbdConfig, NbdError, connect};
use riser_disks::{BUFFERS, ThreadDisk};
use riser_exports::nbd::client::HandshakeError;
use riser_testkit::eventually;
use riser_testkit::skip::skip;

const SIZE: u64 = 16 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

const CONFIG: NbdConfig = NbdConfig {
    connect: PATIENCE,
    operation: PATIENCE,
    read_only: false,
    buffers: BUFFERS,
};

/// A server with its directory and disk.
struct Server {
    child: Child,
    dir: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Server {
    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Starts a program. `DIR` in an argument is replaced by the directory. Returns `None` if the
    /// program is not installed.
    fn start(name: &str, program: &str, args: &[&str]) -> Option<Self> {
        let dir = std::env::temp_dir().join(format!("riser-{name}-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let file = std::fs::File::create(dir.join("disk.img")).unwrap();
        file.set_len(SIZE).unwrap();
        let args = args.iter().map(|a| a.replace("DIR", dir.to_str().unwrap()));
        let child = Command::new(program)
            .args(args)
            .stdin(Stdio::null())
            .spawn();
        match child {
            Ok(child) => Some(Self { child, dir }),
            Err(error) => {
                skip(program, &error.to_string());
                std::fs::remove_dir_all(&dir).unwrap();
                None
            }
        }
    }

    fn wait_for_socket(&self) -> String {
        let socket = self.file("nbd");
        eventually("the server listens", PATIENCE, || {
            UnixStream::connect(&socket).is_ok()
        });
        socket.display().to_string()
    }
}

fn write(disk: &ThreadDisk, offset: u64, len: usize, byte: u8, fua: bool) {
    let buffer = block_on(disk.buffer(len));
    buffer.slice().fill(0, len, byte);
    block_on(BlockDevice::write(disk, offset, buffer, fua)).unwrap();
}

fn read(disk: &ThreadDisk, offset: u64, len: usize) -> Vec<u8> {
    let buffer = block_on(disk.buffer(len));
    buffer.slice().fill(0, len, 0xee);
    let buffer = block_on(BlockDevice::read(disk, offset, buffer)).unwrap();
    buffer.slice().to_vec()
}

/// Executes all operations and checks their effects.
fn try_all(disk: &ThreadDisk) {
    assert_eq!(disk.geometry().capacity, SIZE);
    assert!(!disk.geometry().read_only && disk.geometry().volatile_cache);
    write(disk, 1 << 20, 256 << 10, 1, false);
    write(disk, 2 << 20, 4096, 2, true);
    block_on(BlockDevice::flush(disk)).unwrap();
    // With a hole in the middle, which may be sent as a separate chunk.
    let got = read(disk, (1 << 20) - 65536, 384 << 10);
    assert!(got[..65536].iter().all(|b| *b == 0));
    assert!(got[65536..320 << 10].iter().all(|b| *b == 1));
    assert!(got[320 << 10..].iter().all(|b| *b == 0));
    assert_eq!(read(disk, 2 << 20, 4096), [2; 4096]);
    let options = ZeroOptions {
        fua: true,
        ..ZeroOptions::default()
    };
    let range = (2 << 20)..(2 << 20) + 4096;
    block_on(BlockDevice::write_zeroes(disk, range, options)).unwrap();
    assert_eq!(read(disk, 2 << 20, 4096), [0; 4096]);
    if disk.geometry().max_discard > 0 {
        block_on(BlockDevice::discard(disk, 1 << 20..(1 << 20) + 65536)).unwrap();
    }
    assert!(disk.geometry().reports_status);
    let extents = block_on(BlockDevice::status(disk, 8 << 20..12 << 20)).unwrap();
    assert_eq!(extents[0].kind, ExtentKind::Hole, "{extents:?}");
    let data = (1 << 20) + 131_072..(1 << 20) + 135_168;
    let extents = block_on(BlockDevice::status(disk, data)).unwrap();
    assert_eq!(extents[0].kind, ExtentKind::Data, "{extents:?}");
}

#[test]
fn qemu_nbd_export_works() {
    let args = [
        "-f",
        "raw",
        "-x",
        "my disk",
        "-t",
        "-e",
        "4",
        "-k",
        "DIR/nbd",
        "DIR/disk.img",
    ];
    let more = ["--discard=unmap", "--cache=writeback"];
    let args: Vec<_> = more.into_iter().chain(args).collect();
    let Some(server) = Server::start("qemu-nbd", "qemu-nbd", &args) else {
        return;
    };
    let socket = server.wait_for_socket();
    let uri = format!("nbd+unix:///my%20disk?socket={socket}");
    let disk = connect(&uri.parse().unwrap(), CONFIG).unwrap();
    try_all(&disk);
    disk.close();
    let file = std::fs::File::open(server.file("disk.img")).unwrap();
    let mut bytes = [0; 4096];
    file.read_exact_at(&mut bytes, (1 << 20) + 131_072).unwrap();
    assert_eq!(bytes, [1; 4096]);
    let other = format!("nbd+unix:///other?socket={socket}");
    let error = connect(&other.parse().unwrap(), CONFIG).unwrap_err();
    let is_unknown = matches!(
        error,
        NbdError::Handshake(HandshakeError::UnknownExport { .. })
    );
    assert!(is_unknown, "{error}");
}

#[test]
fn nbdkit_export_works() {
    let args = [
        "-f",
        "-U",
        "DIR/nbd",
        "--filter=fua",
        "file",
        "DIR/disk.img",
    ];
    let Some(server) = Server::start("nbdkit", "nbdkit", &args) else {
        return;
    };
    let socket = server.wait_for_socket();
    let uri = format!("nbd+unix:///?socket={socket}");
    try_all(&connect(&uri.parse().unwrap(), CONFIG).unwrap());
}

#[test]
fn nbdkit_export_works_over_tcp() {
    // This port was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let port = free.port().to_string();
    let args = ["-f", "-i", "127.0.0.1", "-p", &port, "memory", "16M"];
    let Some(_server) = Server::start("nbdkit-tcp", "nbdkit", &args) else {
        return;
    };
    eventually("the server listens", PATIENCE, || {
        TcpStream::connect(free).is_ok()
    });
    let uri = format!("nbd://127.0.0.1:{port}/");
    try_all(&connect(&uri.parse().unwrap(), CONFIG).unwrap());
}
