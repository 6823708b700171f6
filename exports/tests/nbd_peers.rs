//! The NBD server with third-party clients: `nbdinfo`, `nbdcopy`, `qemu-img`, `qemu-io` and fio's
//! nbd engine, with a disk in memory. If a client is not installed, the test is skipped and the
//! skip is counted.

#![allow(missing_docs, reason = "a test")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use riser_block::{ByteDevice, Geometry, MemoryDevice};
use riser_exports::nbd::{Server, ServerHandle};
use riser_testkit::skip::skip;

const SIZE: u64 = 64 << 20;

struct Bed {
    dir: PathBuf,
    socket: PathBuf,
    device: Arc<MemoryDevice>,
    server: Option<ServerHandle>,
}

impl Bed {
    fn new(block: u32, change: impl FnOnce(&mut Geometry)) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let dir = std::env::temp_dir().join(format!(
            "riser-nbd-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        ));
        std::fs::create_dir(&dir).unwrap();
        let device = MemoryDevice::new(SIZE, block)
            .unwrap()
            .with_geometry(change)
            .with_thread()
            .unwrap();
        let device = Arc::new(device);
        let socket = dir.join("nbd");
        let bytes = Arc::new(ByteDevice::new(device.clone()));
        let server = Server::bind(&socket, bytes, "disk", "a disk in memory").unwrap();
        let server = Some(server.start().unwrap());
        Self {
            dir,
            socket,
            device,
            server,
        }
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.socket.display())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Creates a file with random bytes and holes; returns its path and content.
    fn image(&self, name: &str) -> (PathBuf, Vec<u8>) {
        let mut bytes = vec![0; SIZE as usize];
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        for (i, chunk) in bytes.chunks_mut(1 << 20).enumerate() {
            if i % 3 == 0 {
                for word in chunk.chunks_mut(8) {
                    state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    word.copy_from_slice(&state.to_le_bytes());
                }
            }
        }
        let path = self.file(name);
        std::fs::write(&path, &bytes).unwrap();
        (path, bytes)
    }

    fn contents(&self) -> Vec<u8> {
        let mut out = vec![0; SIZE as usize];
        self.device.memory().read(0, &mut out);
        out
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop().unwrap();
        }
        assert!(!self.socket.exists());
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Runs a tool and returns its output. If it is not installed, reports a skip and returns `None`.
fn tool(name: &str, args: &[&str]) -> Option<String> {
    let output = match Command::new(name).args(args).output() {
        Ok(output) => output,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            skip(name, "it is not installed");
            return None;
        }
        Err(e) => panic!("{name}: {e}"),
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{name} {args:?}: {}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Some(text)
}

fn path(p: &Path) -> &str {
    p.to_str().unwrap()
}

#[test]
fn nbdinfo_reports_export_and_map() {
    let bed = Bed::new(512, |_| {});
    let Some(json) = tool("nbdinfo", &["--json", &bed.uri()]) else {
        return;
    };
    for want in [
        "\"export-size\": 67108864",
        "\"is_read_only\": false",
        "\"can_multi_conn\": true",
        "\"can_df\": true",
        "\"can_fast_zero\": true",
        "\"can_trim\": true",
        "\"can_zero\": true",
        "\"can_cache\": true",
        "\"can_fua\": true",
        "base:allocation",
        "\"block_size_maximum\": 33554432",
    ] {
        assert!(json.contains(want), "no {want} in {json}");
    }
    tool(
        "nbdinfo",
        &[
            "--list",
            &format!("nbd+unix:///?socket={}", path(&bed.socket)),
        ],
    );
    bed.device.memory().write(0, b"x");
    let Some(map) = tool("nbdinfo", &["--map", "--json", &bed.uri()]) else {
        return;
    };
    assert!(map.contains("\"description\": \"hole,zero\""), "{map}");
}

#[test]
fn nbdcopy_round_trip_is_identical() {
    for block in [512, 4096] {
        let bed = Bed::new(block, |_| {});
        let (image, bytes) = bed.image("image");
        if tool("nbdcopy", &["--flush", path(&image), &bed.uri()]).is_none() {
            return;
        }
        assert!(bed.contents() == bytes);
        assert!(bed.device.flushes() > 0);
        let back = bed.file("back");
        tool(
            "nbdcopy",
            &["--connections=4", "--requests=64", &bed.uri(), path(&back)],
        );
        assert!(std::fs::read(back).unwrap() == bytes);
    }
}

#[test]
fn qemu_img_converts_and_compares() {
    let bed = Bed::new(4096, |_| {});
    let (image, bytes) = bed.image("image");
    let uri = format!("nbd:unix:{}:exportname=disk", path(&bed.socket));
    let args = ["convert", "-n", "-f", "raw", "-O", "raw", "-W", "-m", "16"];
    if tool("qemu-img", &[&args[..], &[path(&image), &uri]].concat()).is_none() {
        return;
    }
    assert!(bed.contents() == bytes);
    tool(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "raw", path(&image), &uri],
    );
    let back = bed.file("back");
    tool(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "raw", &uri, path(&back)],
    );
    assert!(std::fs::read(back).unwrap() == bytes);
}

#[test]
fn qemu_io_commands_work_at_odd_offsets() {
    for (block, zeroes) in [(512, true), (4096, true), (4096, false)] {
        let bed = Bed::new(block, |g| {
            if !zeroes {
                g.max_write_zeroes = 0;
            }
        });
        let uri = format!("nbd+unix:///disk?socket={}", path(&bed.socket));
        let script = [
            "write -P 0x11 0 3M",
            "write -P 0x22 12345 54321",
            "read -P 0x11 0 12345",
            "read -P 0x22 12345 54321",
            "write -f -P 0x33 1048575 2",
            "read -P 0x33 1048575 2",
            "read -P 0x11 1048577 512",
            "write -z 2000000 70001",
            "read -P 0 2000000 70001",
            "read -P 0x11 2070001 100",
            "write -z -u 65536 65536",
            "read -P 0 65536 65536",
            "write -z -n 0 1M",
            "discard 0 1M",
            "flush",
            "write -P 0x44 63M 1M",
            "read -P 0x44 63M 1M",
            "read 0 32M",
            "aio_write -P 0x55 4M 8M",
            "aio_write -P 0x66 12M 8M",
            "aio_read 0 2M",
            "aio_flush",
            "read -P 0x55 4M 8M",
            "read -P 0x66 12M 8M",
        ];
        let script: Vec<_> = script
            .iter()
            // Fast zeroing must fail if it would be slow.
            .filter(|line| zeroes || !line.contains("-n"))
            .collect();
        let mut args = vec!["-f", "raw"];
        for line in &script {
            args.extend(["-c", line]);
        }
        args.push(&uri);
        let Some(text) = tool("qemu-io", &args) else {
            return;
        };
        assert!(!text.contains("failed"), "{text}");
        assert!(!text.contains("Pattern"), "{text}");
    }
}

#[test]
fn fio_verifies_written_data() {
    let bed = Bed::new(512, |_| {});
    let engines = tool("fio", &["--enghelp"]);
    if !engines.is_some_and(|e| e.contains("nbd")) {
        return skip("fio_verifies_written_data", "fio has no nbd engine");
    }
    let uri = format!("--uri={}", bed.uri());
    tool(
        "fio",
        &[
            "--name=t",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--bsrange=512-256k",
            "--bs_unaligned=1",
            "--iodepth=32",
            "--size=64M",
            "--io_size=64M",
            "--verify=crc32c",
            "--verify_backlog=64",
            "--serialize_overlap=1",
            "--verify_state_save=0",
            "--minimal",
        ],
    );
}

#[test]
fn read_only_disk_is_exported_read_only() {
    let bed = Bed::new(512, |g| g.read_only = true);
    let Some(json) = tool("nbdinfo", &["--json", &bed.uri()]) else {
        return;
    };
    assert!(json.contains("\"is_read_only\": true"), "{json}");
}

#[test]
fn errors_reach_client_without_disconnect() {
    let bed = Bed::new(512, |_| {});
    bed.device.spoil(3 << 20..(3 << 20) + 512);
    let uri = bed.uri();
    let Ok(output) = Command::new("qemu-io")
        .args([
            "-f",
            "raw",
            "-c",
            "read 0 8M",
            "-c",
            "read 0 2M",
            "-c",
            "write 3M 1k",
            &uri,
        ])
        .output()
    else {
        return skip("qemu-io", "it is not installed");
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("read failed: Input/output error"), "{text}");
    assert!(text.contains("read 2097152/2097152"), "{text}");
    assert!(text.contains("write failed: Input/output error"), "{text}");
}

/// Negotiates manually, without structured replies.
fn plain_client(bed: &Bed) -> UnixStream {
    let mut client = UnixStream::connect(&bed.socket).unwrap();
    client
        .write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0")
        .unwrap();
    let mut reply = [0; 18 + 10];
    client.read_exact(&mut reply).unwrap();
    client
}

fn request(kind: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut out = vec![0x25, 0x60, 0x95, 0x13, 0, 0];
    out.extend(kind.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    out.extend(offset.to_be_bytes());
    out.extend(len.to_be_bytes());
    out
}

#[test]
fn plain_client_gets_single_long_reply() {
    let bed = Bed::new(512, |_| {});
    bed.device.memory().write(5 << 20, b"here");
    let mut client = plain_client(&bed);
    client.write_all(&request(0, 7, 1, 8 << 20)).unwrap();
    let mut reply = vec![0; 16 + (8 << 20)];
    client.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..16], *b"\x67\x44\x66\x98\0\0\0\0\0\0\0\0\0\0\0\x07");
    assert_eq!(reply[16 + (5 << 20) - 1..][..4], *b"here");
}

#[test]
fn non_reading_client_is_throttled() {
    let bed = Bed::new(512, |_| {});
    let mut client = plain_client(&bed);
    client
        .set_write_timeout(Some(std::time::Duration::from_millis(300)))
        .unwrap();
    // Far more than the limits allow, in replies of 1 MiB each.
    let batch: Vec<u8> = (0..4096).flat_map(|i| request(0, i, 0, 1 << 20)).collect();
    let mut sent = 0usize;
    let blocked = loop {
        match client.write(&batch) {
            Ok(n) => sent += n,
            Err(e) => break e,
        }
        assert!(sent < 64 << 20, "the server reads on and on");
    };
    assert_eq!(blocked.kind(), std::io::ErrorKind::WouldBlock);
    // All replies are received in some order, once the client reads.
    let mut reply = vec![0; 16 + (1 << 20)];
    for _ in 0..sent / 28 {
        client.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..8], *b"\x67\x44\x66\x98\0\0\0\0");
    }
}

#[test]
fn non_reading_client_leaves_buffers_for_others() {
    let bed = Bed::new(512, |_| {});
    let mut greedy = plain_client(&bed);
    let batch: Vec<u8> = (0..80).flat_map(|i| request(0, i, 0, 1 << 20)).collect();
    greedy.write_all(&batch).unwrap();
    let mut other = plain_client(&bed);
    // If it had to wait for buffers, it would wait as long as the greedy client.
    other
        .set_read_timeout(Some(std::time::Duration::from_secs(60)))
        .unwrap();
    let mut reply = vec![0; 16 + (1 << 20)];
    for cookie in 0..64 {
        other.write_all(&request(0, cookie, 0, 1 << 20)).unwrap();
        other.read_exact(&mut reply).unwrap();
        other.write_all(&request(1, cookie, 0, 1 << 20)).unwrap();
        other.write_all(&reply[16..]).unwrap();
        other.read_exact(&mut reply[..16]).unwrap();
        assert_eq!(reply[4..8], [0; 4]);
    }
    // All requested replies are still received.
    for _ in 0..80 {
        greedy.read_exact(&mut reply).unwrap();
    }
}

/// The client uses all available buffers on many connections, without reading replies.
#[test]
fn many_connections_leave_buffers_for_others() {
    let bed = Bed::new(512, |_| {});
    let batch: Vec<u8> = (0..80).flat_map(|i| request(0, i, 0, 1 << 20)).collect();
    let mut greedy: Vec<UnixStream> = (0..16).map(|_| plain_client(&bed)).collect();
    for client in &mut greedy {
        client.write_all(&batch).unwrap();
        let patience = std::time::Duration::from_secs(2);
        client.set_read_timeout(Some(patience)).unwrap();
        // When its first reply is being sent, it has its buffers or waits for them.
        let _ = client.read_exact(&mut [0; 16]);
    }
    let mut other = plain_client(&bed);
    other
        .set_read_timeout(Some(std::time::Duration::from_secs(60)))
        .unwrap();
    other
        .set_write_timeout(Some(std::time::Duration::from_secs(60)))
        .unwrap();
    let mut reply = vec![0; 16 + (1 << 20)];
    for cookie in 0..16u8 {
        let data = vec![cookie; 1 << 20];
        other
            .write_all(&request(1, cookie.into(), 511, 1 << 20))
            .unwrap();
        other.write_all(&data).unwrap();
        other.read_exact(&mut reply[..16]).unwrap();
        assert_eq!(reply[4..8], [0; 4]);
        other
            .write_all(&request(0, cookie.into(), 511, 1 << 20))
            .unwrap();
        other.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..8], [0; 4]);
        assert!(reply[16..] == data);
    }
}

#[test]
fn stopping_with_clients_in_flight_returns() {
    let mut bed = Bed::new(512, |_| {});
    let mut silent = UnixStream::connect(&bed.socket).unwrap();
    let mut busy = plain_client(&bed);
    busy.write_all(&request(0, 1, 0, 4096)).unwrap();
    let mut reply = vec![0; 16 + 4096];
    busy.read_exact(&mut reply).unwrap();
    // A write whose payload is never sent.
    busy.write_all(&request(1, 2, 0, 4096)).unwrap();
    bed.server.take().unwrap().stop().unwrap();
    let mut rest = Vec::new();
    silent.read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len(), 18);
}
