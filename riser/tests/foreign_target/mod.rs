//! A scripted iSCSI target over TCP, for tests with logical units that conform to the standards but
//! behave differently from those of `riserd`.
//!
//! [`ForeignTarget::start`] serves a single disk. All commands are passed to its [`Script`] first;
//! commands ignored by the script get the default reply of [`Disk`]. Reads return [`FILL`], and
//! writes are discarded.

#![allow(dead_code, reason = "each test program uses a part")]
#![allow(missing_docs, reason = "a test")]

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use riser_block::task::block_on;
use riser_initiator::engine::{Client, Session};
use riser_initiator::lun::Lun;
use riser_initiator::session::Timing;
use riser_initiator::url::IscsiUrl;

pub(crate) const NAME: &str = "iqn.2026-01.com.example:disk";
/// Length of Data-In segments, and of the data solicited by an R2T.
const SEGMENT: usize = 64 << 10;
/// Content of all blocks.
pub(crate) const FILL: u8 = 0x5a;

/// Reply to a SCSI command.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reply {
    /// Response code, sense key, additional sense code and qualifier; `None` for GOOD.
    pub(crate) sense: Option<[u8; 4]>,
    pub(crate) data: Vec<u8>,
    /// SCSI event (asynchronous message) to send after the response: sense key, code and qualifier.
    pub(crate) event: Option<[u8; 3]>,
    pub(crate) delay: Duration,
    /// Close the connection instead.
    pub(crate) disconnect: bool,
    /// With [`Self::disconnect`]: do not accept further connections.
    pub(crate) is_last: bool,
}

pub(crate) fn good(data: impl Into<Vec<u8>>) -> Reply {
    Reply {
        data: data.into(),
        ..Reply::default()
    }
}

/// Returns CHECK CONDITION with fixed-format sense data for this response code (70h or 71h).
pub(crate) fn check_condition(code: u8, key: u8, asc: u8, ascq: u8) -> Reply {
    Reply {
        sense: Some([code, key, asc, ascq]),
        ..Reply::default()
    }
}

pub(crate) fn illegal_request(asc: u8) -> Reply {
    check_condition(0x70, 5, asc, 0)
}

/// Returns the reply to a command, based on its CDB and data, or `None` for the disk's default
/// reply.
pub(crate) type Script = Box<dyn FnMut(&[u8], &[u8]) -> Option<Reply> + Send>;

/// Returns a script that passes all commands to the disk.
pub(crate) fn unscripted() -> Script {
    Box::new(|_: &[u8], _: &[u8]| None)
}

/// Properties of the logical unit and its target.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    pub(crate) blocks: u64,
    pub(crate) dpofua: bool,
    pub(crate) write_cache: bool,
    /// MAXIMUM WRITE SAME LENGTH; 0 if not reported.
    pub(crate) max_write_same: u64,
    /// Reply to SendTargets.
    pub(crate) targets: Vec<u8>,
}

impl Default for Disk {
    fn default() -> Self {
        Self {
            blocks: 8 << 21,
            dpofua: true,
            write_cache: true,
            max_write_same: 0,
            targets: Vec::new(),
        }
    }
}

impl Disk {
    fn execute(&self, cdb: &[u8]) -> Reply {
        let page = |code: u8, body: &[u8]| good([&[0, code, 0, body.len() as u8], body].concat());
        match cdb {
            [0x12, 0, ..] => {
                let mut inquiry = vec![b' '; 96];
                inquiry[..8].copy_from_slice(&[0, 0, 6, 2, 91, 0, 0, 2]);
                good(inquiry)
            }
            [0x12, 1, 0x00, ..] => page(0, &[0, 0x80, 0xb0, 0xb2]),
            [0x12, 1, 0x80, ..] => page(0x80, b"S1"),
            [0x12, 1, 0xb0, ..] => {
                let mut limits = [0; 60];
                limits[32..40].copy_from_slice(&self.max_write_same.to_be_bytes());
                page(0xb0, &limits)
            }
            [0x12, 1, 0xb2, ..] => page(0xb2, &[0, 0x40, 0, 0]),
            [0x12, ..] => illegal_request(0x24),
            [0x25, ..] => {
                let last = u32::try_from(self.blocks - 1).unwrap_or(u32::MAX);
                good([last.to_be_bytes(), [0, 0, 2, 0]].concat())
            }
            [0x9e, ..] => {
                let mut capacity = vec![0; 32];
                capacity[..8].copy_from_slice(&(self.blocks - 1).to_be_bytes());
                (capacity[10], capacity[14]) = (2, 0x40);
                good(capacity)
            }
            [0x1a, ..] => {
                let mut mode = vec![0; 24];
                (mode[0], mode[2]) = (23, if self.dpofua { 0x10 } else { 0 });
                mode[4..6].copy_from_slice(&[8, 18]);
                mode[6] = if self.write_cache { 4 } else { 0 };
                good(mode)
            }
            [0xa0, ..] => good([&[0, 0, 0, 8][..], &[0; 12]].concat()),
            [0x88, ..] => {
                let blocks = u32::from_be_bytes(cdb[10..14].try_into().unwrap());
                good(vec![FILL; blocks as usize * 512])
            }
            [0x28, ..] => {
                let blocks = u16::from_be_bytes(cdb[7..9].try_into().unwrap());
                good(vec![FILL; usize::from(blocks) * 512])
            }
            _ => Reply::default(),
        }
    }
}

/// Sending side of a connection with its sequence numbers.
struct Sender {
    stream: TcpStream,
    stat_sn: u32,
    exp_cmd_sn: u32,
}

impl Sender {
    fn send(&mut self, mut bhs: [u8; 48], data: &[u8], has_status: bool) {
        bhs[5..8].copy_from_slice(&(data.len() as u32).to_be_bytes()[1..]);
        bhs[24..28].copy_from_slice(&self.stat_sn.to_be_bytes());
        self.stat_sn += u32::from(has_status);
        bhs[28..32].copy_from_slice(&self.exp_cmd_sn.to_be_bytes());
        bhs[32..36].copy_from_slice(&(self.exp_cmd_sn + 32).to_be_bytes());
        let mut bytes = [&bhs, data].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let _ = self.stream.write_all(&bytes);
    }

    fn respond(&mut self, itt: [u8; 4], expected: u32, reply: &Reply) {
        let len = reply.data.len().min(expected as usize);
        let segments = reply.data[..len].chunks(SEGMENT);
        let last = segments.len().saturating_sub(1);
        for (number, segment) in segments.enumerate() {
            let flags = if number == last { 0x80 } else { 0 };
            let mut data_in = header(0x25, flags, itt);
            data_in[20..24].fill(0xff);
            data_in[36..40].copy_from_slice(&(number as u32).to_be_bytes());
            data_in[40..44].copy_from_slice(&((number * SEGMENT) as u32).to_be_bytes());
            self.send(data_in, segment, false);
        }
        let mut response = header(0x21, 0x80, itt);
        let is_read = !reply.data.is_empty();
        if is_read && len < expected as usize {
            response[1] |= 2;
            response[44..48].copy_from_slice(&(expected - len as u32).to_be_bytes());
        }
        let sense = reply.sense.map(fixed_sense).unwrap_or_default();
        response[3] = if sense.is_empty() { 0 } else { 2 };
        self.send(response, &sense, true);
        if let Some([key, asc, ascq]) = reply.event {
            let event = header(0x32, 0x80, [0xff; 4]);
            self.send(event, &fixed_sense([0x70, key, asc, ascq]), true);
        }
    }

    /// Solicits the remaining data of a write.
    fn request_data(&mut self, itt: [u8; 4], offset: usize, expected: u32) {
        let mut r2t = header(0x31, 0x80, itt);
        let len = (expected - offset as u32).min(SEGMENT as u32);
        r2t[40..44].copy_from_slice(&(offset as u32).to_be_bytes());
        r2t[44..48].copy_from_slice(&len.to_be_bytes());
        self.send(r2t, &[], false);
    }

    fn log_in(&mut self, bhs: &[u8; 48], text: &[u8]) {
        self.exp_cmd_sn = u32::from_be_bytes(bhs[24..28].try_into().unwrap());
        let mut out = Vec::new();
        for pair in text.split(|byte| *byte == 0).filter(|p| !p.is_empty()) {
            let pair = std::str::from_utf8(pair).unwrap();
            let (key, value) = pair.split_once('=').unwrap();
            let value = match key {
                "AuthMethod" | "HeaderDigest" | "DataDigest" => "None",
                "MaxRecvDataSegmentLength" => "262144",
                "MaxConnections" => "1",
                "ErrorRecoveryLevel" => "0",
                "InitiatorName" | "TargetName" | "SessionType" => continue,
                _ => value,
            };
            out.extend(format!("{key}={value}\0").into_bytes());
        }
        let mut response = header(0x23, bhs[1], bhs[16..20].try_into().unwrap());
        response[8..14].copy_from_slice(&bhs[8..14]);
        response[15] = 1;
        self.send(response, &out, true);
    }
}

fn header(opcode: u8, flags: u8, itt: [u8; 4]) -> [u8; 48] {
    let mut bhs = [0; 48];
    (bhs[0], bhs[1]) = (opcode, flags);
    bhs[16..20].copy_from_slice(&itt);
    bhs
}

/// Returns sense data as the data segment of a SCSI Response, preceded by SenseLength.
fn fixed_sense(sense: [u8; 4]) -> Vec<u8> {
    let mut bytes = vec![0; 20];
    bytes[1] = 18;
    (bytes[2], bytes[4], bytes[9]) = (sense[0], sense[1], 10);
    (bytes[14], bytes[15]) = (sense[2], sense[3]);
    bytes
}

struct Shared {
    disk: Disk,
    script: Mutex<Script>,
    is_away: AtomicBool,
}

impl Shared {
    fn execute(&self, cdb: &[u8], data: &[u8]) -> Reply {
        let reply = (self.script.lock().unwrap())(cdb, data);
        reply.unwrap_or_else(|| self.disk.execute(cdb))
    }

    /// Serves a connection until it closes.
    fn serve(&self, mut stream: TcpStream) -> Option<()> {
        let sender = Arc::new(Mutex::new(Sender {
            stream: stream.try_clone().ok()?,
            stat_sn: 1,
            exp_cmd_sn: 1,
        }));
        let mut listed = 0;
        let mut writes: HashMap<[u8; 4], (u32, Vec<u8>)> = HashMap::new();
        let mut cdbs = HashMap::new();
        loop {
            let mut bhs = [0; 48];
            stream.read_exact(&mut bhs).ok()?;
            let len = u32::from_be_bytes([0, bhs[5], bhs[6], bhs[7]]) as usize;
            let mut data = vec![0; usize::from(bhs[4]) * 4 + len.next_multiple_of(4)];
            stream.read_exact(&mut data).ok()?;
            data.truncate(usize::from(bhs[4]) * 4 + len);
            let itt: [u8; 4] = bhs[16..20].try_into().unwrap();
            if bhs[0] & 0x40 == 0 {
                let cmd_sn = u32::from_be_bytes(bhs[24..28].try_into().unwrap());
                sender.lock().unwrap().exp_cmd_sn = cmd_sn + 1;
            }
            let send = |bhs, data: &[u8]| sender.lock().unwrap().send(bhs, data, true);
            match bhs[0] & 0x3f {
                0x03 => sender.lock().unwrap().log_in(&bhs, &data),
                0x00 if itt != [0xff; 4] => {
                    let mut nop = header(0x20, 0x80, itt);
                    nop[20..24].fill(0xff);
                    send(nop, &data);
                }
                0x02 => send(header(0x22, 0x80, itt), &[]),
                0x04 => {
                    let targets = &self.disk.targets;
                    let part = &targets[listed..(listed + 8192).min(targets.len())];
                    listed += part.len();
                    let is_last = listed == targets.len();
                    let mut text = header(0x24, if is_last { 0x80 } else { 0x40 }, itt);
                    text[20..24].fill(if is_last { 0xff } else { 1 });
                    send(text, part);
                }
                0x06 => {
                    send(header(0x26, 0x80, itt), &[]);
                    return None;
                }
                0x01 | 0x05 => {
                    if bhs[0] & 0x3f == 0x01 {
                        let expected = u32::from_be_bytes(bhs[20..24].try_into().unwrap());
                        cdbs.insert(itt, <[u8; 16]>::try_from(&bhs[32..48]).unwrap());
                        writes.insert(itt, (expected, data));
                    } else if let Some((_, received)) = writes.get_mut(&itt) {
                        received.extend(data);
                    }
                    let (expected, received) = writes.get(&itt)?;
                    let (expected, is_write) = (*expected, bhs[1] & 0x20 != 0 || bhs[0] == 0x05);
                    if is_write && received.len() < expected as usize {
                        // More data follows until the F bit.
                        if bhs[1] & 0x80 != 0 {
                            let offset = received.len();
                            sender.lock().unwrap().request_data(itt, offset, expected);
                        }
                        continue;
                    }
                    let (_, data) = writes.remove(&itt)?;
                    let reply = self.execute(&cdbs.remove(&itt)?, &data);
                    if reply.disconnect {
                        self.is_away.store(reply.is_last, Ordering::Relaxed);
                        let _ = stream.shutdown(Shutdown::Both);
                        return None;
                    }
                    if reply.delay.is_zero() {
                        sender.lock().unwrap().respond(itt, expected, &reply);
                        continue;
                    }
                    let sender = sender.clone();
                    thread::spawn(move || {
                        thread::sleep(reply.delay);
                        sender.lock().unwrap().respond(itt, expected, &reply);
                    });
                }
                _ => {}
            }
        }
    }
}

/// A target that runs until the test program exits.
pub(crate) struct ForeignTarget {
    pub(crate) portal: SocketAddr,
    pub(crate) url: IscsiUrl,
}

impl ForeignTarget {
    pub(crate) fn start(disk: Disk, script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let portal = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            disk,
            script: Mutex::new(script),
            is_away: AtomicBool::new(false),
        });
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = shared.clone();
                if !shared.is_away.load(Ordering::Relaxed) {
                    thread::spawn(move || shared.serve(stream));
                }
            }
        });
        Self {
            portal,
            url: format!("iscsi://{portal}/{NAME}/0").parse().unwrap(),
        }
    }

    pub(crate) fn client(&self, timing: Timing) -> Client {
        let client = Client::builder().pool(8 << 20).timing(timing);
        client.without_device().unwrap()
    }

    pub(crate) fn connect(&self) -> (Session, Lun) {
        self.connect_with(Timing::default())
    }

    pub(crate) fn connect_with(&self, timing: Timing) -> (Session, Lun) {
        let session = block_on(self.client(timing).connect(&self.url)).unwrap();
        let lun = block_on(session.lun(0)).unwrap();
        (session, lun)
    }
}

/// Writes 4 KiB at the start of a disk.
pub(crate) fn write(lun: &Lun, fua: bool) -> Result<(), String> {
    let buffer = block_on(lun.buffers().take_buffer(4096));
    buffer.slice().fill(0, 4096, 7);
    let written = block_on(lun.write(0, buffer, fua));
    written.map(drop).map_err(|error| error.to_string())
}

/// Reads 4 KiB at an offset.
pub(crate) fn read(lun: &Lun, offset: u64) -> Result<Vec<u8>, String> {
    let buffer = block_on(lun.buffers().take_buffer(4096));
    let read = block_on(lun.read(offset, buffer));
    let data = read.map(|buffer| buffer.slice().to_vec());
    data.map_err(|error| error.to_string())
}

/// Runs `riser attach --nbd` in the foreground for a URL, with the socket `nbd` in a private
/// directory.
pub(crate) struct Attached {
    pub(crate) child: Child,
    pub(crate) dir: PathBuf,
}

impl Attached {
    /// Starts the attachment. `name` distinguishes the directories of a test program; `stderr`
    /// receives the log.
    pub(crate) fn start(url: &str, name: &str, stderr: Stdio) -> Self {
        use std::io::{BufRead, BufReader};
        let dir = std::env::temp_dir().join(format!("riser-{name}-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_riser"))
            .args(["-v", "attach", url, "--foreground", "--nbd"])
            .arg(dir.join("nbd"))
            .env("RISER_STATE_DIR", dir.join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        assert!(line.contains("nbd"), "{line}");
        Self { child, dir }
    }

    pub(crate) fn nbd(&self) -> Nbd {
        Nbd::connect(&self.dir.join("nbd"))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A minimal NBD client for the default export.
pub(crate) struct Nbd {
    stream: UnixStream,
    pub(crate) size: u64,
    /// Transmission flags.
    pub(crate) flags: u16,
}

impl Nbd {
    pub(crate) const WRITE: u8 = 1;
    pub(crate) const FLUSH: u8 = 3;

    pub(crate) fn connect(path: &Path) -> Self {
        let mut stream = UnixStream::connect(path).unwrap();
        let patience = Some(Duration::from_secs(20));
        stream.set_read_timeout(patience).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        // Fixed newstyle, no zeroes; NBD_OPT_EXPORT_NAME for the default export.
        let choice = [&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 0, 0, 0]];
        stream.write_all(&choice.concat()).unwrap();
        let mut export = [0; 10];
        stream.read_exact(&mut export).unwrap();
        Self {
            stream,
            size: u64::from_be_bytes(export[..8].try_into().unwrap()),
            flags: u16::from_be_bytes(export[8..].try_into().unwrap()),
        }
    }

    /// Executes a command without reply data; returns the error code of the reply.
    pub(crate) fn execute(&mut self, command: u8, flags: u16, offset: u64, data: &[u8]) -> u32 {
        let mut request = vec![0x25, 0x60, 0x95, 0x13];
        request.extend(flags.to_be_bytes());
        request.extend([0, command]);
        request.extend([7; 8]);
        request.extend(offset.to_be_bytes());
        request.extend((data.len() as u32).to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request).unwrap();
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply).unwrap();
        u32::from_be_bytes(reply[4..8].try_into().unwrap())
    }
}
