//! iSCSI sessions on TCP, with a target played by the test.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use riser_scsi::iscsi::BHS_LEN;
use riser_scsi::iscsi::frame::{self, Digests};
use riser_scsi::lun::LunId;

use super::*;
use crate::engine::{IoCompletion, IoData, ScsiIo};
use crate::scsi::BlockRange;
use crate::url::IscsiUrl;

const PATIENCE: Duration = Duration::from_secs(20);

/// RESERVATION CONFLICT, which is never retried by a session.
const CONFLICT: u8 = 0x18;

/// Length of the write in bytes.
const LEN: u32 = 256 << 10;

/// The target's side of a connection.
struct Peer {
    stream: UnixStream,
    bytes: Vec<u8>,
    stat_sn: u32,
    exp_cmd_sn: u32,
}

impl Peer {
    /// Accepts the next connection.
    fn accept() -> Self {
        let mut stream = None;
        eventually("a connection", || {
            stream = stream.take().or_else(world::accept_tcp);
            stream.is_some()
        });
        Self {
            stream: stream.expect("it has been accepted"),
            bytes: Vec::new(),
            stat_sn: 1,
            exp_cmd_sn: 1,
        }
    }

    /// Reads up to `max` received bytes; returns their number.
    fn read(&mut self, max: usize) -> usize {
        let mut part = vec![0; max];
        match self.stream.read(&mut part) {
            Ok(len) => {
                self.bytes.extend_from_slice(&part[..len]);
                len
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => 0,
            Err(e) => panic!("{e}"),
        }
    }

    /// Parses the next PDU that was read; returns its header and data length.
    fn next_pdu(&mut self) -> Option<([u8; BHS_LEN], u32)> {
        let bhs = *self.bytes.first_chunk::<BHS_LEN>()?;
        let len = word(&bhs, 4) & 0xff_ffff;
        let end = BHS_LEN + (len as usize).next_multiple_of(4);
        if self.bytes.len() < end {
            return None;
        }
        self.bytes.drain(..end);
        Some((bhs, len))
    }

    /// Reads the next PDU; returns its header and data length.
    fn pdu(&mut self) -> ([u8; BHS_LEN], u32) {
        let until = world::now() + PATIENCE;
        loop {
            if let Some(pdu) = self.next_pdu() {
                return pdu;
            }
            assert!(world::now() < until, "not in time: a PDU");
            if self.read(8192) == 0 {
                world::step(Some(until));
            }
        }
    }

    /// Sends a PDU with the next status number.
    fn send(&mut self, bhs: [u8; BHS_LEN], data: &[u8]) {
        let out = self.pdu_of(bhs, data);
        self.stream.write_all(&out).unwrap();
    }

    /// Returns the bytes of a PDU with the next status number.
    fn pdu_of(&mut self, mut bhs: [u8; BHS_LEN], data: &[u8]) -> Vec<u8> {
        bhs[24..28].copy_from_slice(&self.stat_sn.to_be_bytes());
        bhs[28..32].copy_from_slice(&self.exp_cmd_sn.to_be_bytes());
        bhs[32..36].copy_from_slice(&(self.exp_cmd_sn + 63).to_be_bytes());
        self.stat_sn += 1;
        let mut out = Vec::new();
        frame::put_pdu(bhs, &[], data, Digests::default(), &mut out);
        out
    }

    /// Responds to the login requests of a session without CHAP.
    fn log_in(&mut self) {
        for text in [
            &b"AuthMethod=None\0"[..],
            b"InitialR2T=Yes\0DefaultTime2Wait=0\0",
        ] {
            let (request, _) = self.pdu();
            let mut bhs = [0; BHS_LEN];
            (bhs[0], bhs[1]) = (0x23, request[1]);
            bhs[8..14].copy_from_slice(&request[8..14]);
            bhs[15] = 1;
            bhs[16..20].copy_from_slice(&request[16..20]);
            self.send(bhs, text);
        }
    }

    /// Solicits the remaining data of a write; returns the command's header and the length of its
    /// immediate data.
    fn solicit_data(&mut self) -> ([u8; BHS_LEN], u32) {
        let (command, immediate) = self.pdu();
        assert_eq!(command[0] & 0x3f, 0x01, "a command");
        self.exp_cmd_sn += 1;
        let mut r2t = [0; BHS_LEN];
        (r2t[0], r2t[1]) = (0x31, 0x80);
        r2t[8..24].copy_from_slice(&command[8..24]);
        r2t[20..24].copy_from_slice(&1u32.to_be_bytes());
        r2t[40..44].copy_from_slice(&immediate.to_be_bytes());
        r2t[44..48].copy_from_slice(&(LEN - immediate).to_be_bytes());
        self.send(r2t, &[]);
        // An R2T contains the next status number without using it.
        self.stat_sn -= 1;
        (command, immediate)
    }

    /// Completes a command with CONFLICT.
    fn complete_command(&mut self, command: &[u8; BHS_LEN]) {
        let mut response = [0; BHS_LEN];
        (response[0], response[1], response[3]) = (0x21, 0x80, CONFLICT);
        response[16..20].copy_from_slice(&command[16..20]);
        self.send(response, &[]);
    }
}

fn word(bhs: &[u8; BHS_LEN], at: usize) -> u32 {
    u32::from_be_bytes(bhs[at..at + 4].try_into().unwrap())
}

/// Advances the world for a while.
fn run_world(wait: Duration) {
    let until = world::now() + wait;
    while world::now() < until {
        world::step(Some(until));
    }
}

/// A session with a write whose data the target has solicited.
struct Written {
    command: [u8; BHS_LEN],
    /// Length of the immediate data.
    immediate: u32,
    session: Session,
    client: Client,
    peer: Peer,
    end: Box<dyn FnMut() -> Option<IoCompletion>>,
}

/// Returns a session and the target's side of its connection.
fn logged_in() -> (Client, Session, Peer) {
    let client = client();
    let url = "iscsi://127.0.0.9/iqn.2026-01.com.example:disk/0";
    let url: IscsiUrl = url.parse().unwrap();
    let connect = client.connect(&url);
    let mut connecting = begin(connect);
    let mut peer = Peer::accept();
    peer.log_in();
    let session = block_on(connecting.as_mut()).unwrap();
    drop(connecting);
    (client, session, peer)
}

impl Written {
    fn new() -> Self {
        let (client, session, mut peer) = logged_in();
        let buffer = block_on(client.buffers().take_buffer(LEN as usize));
        let range = BlockRange {
            lba: 0,
            blocks: LEN / 512,
        };
        let io = ScsiIo::new(
            LunId::new(0).unwrap(),
            Command::write(range, LEN, false),
            IoData::One(buffer),
            Duration::from_secs(60),
        );
        let mut write = begin(session.submit(io));
        let (command, immediate) = peer.solicit_data();
        Self {
            command,
            immediate,
            session,
            client,
            peer,
            end: Box::new(move || {
                let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
                match write.as_mut().poll(&mut cx) {
                    std::task::Poll::Ready(end) => Some(end),
                    std::task::Poll::Pending => None,
                }
            }),
        }
    }
}

/// A target on a slow network responds to a write after receiving all of its data. While the data
/// is being sent, neither the write nor the ping after it times out.
#[test]
fn write_does_not_time_out_while_sending() {
    let mut written = Written::new();
    let begun = world::now();
    let mut data = 0;
    loop {
        run_world(Duration::from_millis(100));
        written.peer.read(2048);
        let peer = &mut written.peer;
        while let Some((bhs, len)) = peer.next_pdu() {
            match bhs[0] & 0x3f {
                // NOP-Out.
                0x00 => continue,
                0x05 => data += len,
                other => panic!("opcode {other:#04x} {:?} later", world::now() - begun),
            }
        }
        if written.immediate + data == LEN {
            break;
        }
        assert!((written.end)().is_none(), "it is late");
        assert!(world::now() < begun + PATIENCE, "not in time: the data");
    }
    let took = world::now() - begun;
    assert!(took > 4 * timing().attempt, "they leave slowly: {took:?}");
    written.peer.complete_command(&written.command);
    run_world(Duration::from_millis(10));
    let end = (written.end)().expect("expected a response");
    assert_eq!(end.result.unwrap().status, CONFLICT);
    assert!(world::accept_tcp().is_none(), "there is one connection");
    written.client.shutdown();
}

/// A target that does not respond gets no extra time for data that was already sent.
#[test]
fn write_times_out_after_data_was_sent() {
    let mut written = Written::new();
    let mut data = written.immediate;
    while data < LEN {
        data += written.peer.pdu().1;
    }
    let begun = world::now();
    let (bhs, _) = written.peer.pdu();
    assert_eq!((bhs[0] & 0x3f, bhs[1] & 0x7f), (0x02, 1), "ABORT TASK");
    let took = world::now() - begun;
    assert!(took < 3 * timing().attempt, "{took:?}");
    written.client.shutdown();
}

/// Data solicited by the target is still sent after its response. During this time, neither the
/// release of the memory nor the ping after it times out.
#[test]
fn slow_data_out_keeps_connection() {
    let mut written = Written::new();
    written.peer.complete_command(&written.command);
    let begun = world::now();
    let end = loop {
        run_world(Duration::from_millis(100));
        written.peer.read(2048);
        if let Some(end) = (written.end)() {
            break end;
        }
        assert!(world::now() < begun + PATIENCE, "not in time: the write");
    };
    let took = world::now() - begun;
    assert!(
        took > 2 * crate::session::PING,
        "it leaves slowly: {took:?}"
    );
    assert_eq!(end.result.unwrap().status, CONFLICT);
    assert!(world::accept_tcp().is_none(), "there is one connection");
    assert_eq!(written.session.status().link(), LinkState::Live);
    written.client.shutdown();
}

#[test]
fn blocked_data_out_breaks_connection() {
    let mut written = Written::new();
    written.peer.complete_command(&written.command);
    let begun: Instant = world::now();
    Peer::accept();
    let took = world::now() - begun;
    assert!(took < 3 * timing().attempt, "{took:?}");
    written.client.shutdown();
}

/// The acknowledgement of a ping by the target's host does not prove that the target reads it.
#[test]
fn acknowledging_host_does_not_prove_liveness() {
    let mut written = Written::new();
    let mut data = written.immediate;
    while data < LEN {
        data += written.peer.pdu().1;
    }
    written.peer.complete_command(&written.command);
    let begun = world::now();
    let mut next = None;
    eventually("another connection", || {
        // The stream contains nothing new, since the session has closed it.
        written.peer.read(8192);
        next = next.take().or_else(world::accept_tcp);
        next.is_some()
    });
    let took = world::now() - begun;
    let pings = 2 * crate::session::PING;
    assert!(took < pings + Duration::from_secs(1), "{took:?}");
    written.client.shutdown();
}

/// A Data-In takes long on a slow network. This is neither silence of the target nor a timeout of
/// the command.
#[test]
fn slow_data_in_keeps_connection() {
    let (client, session, mut peer) = logged_in();
    let buffer = block_on(client.buffers().take_buffer(LEN as usize));
    let range = BlockRange {
        lba: 0,
        blocks: LEN / 512,
    };
    let io = ScsiIo::new(
        LunId::new(0).unwrap(),
        Command::read(range, LEN),
        IoData::One(buffer),
        Duration::from_secs(60),
    );
    let mut read = begin(session.submit(io));
    let (command, _) = peer.pdu();
    peer.exp_cmd_sn += 1;
    let mut data_in = [0; BHS_LEN];
    // F bit, without a status.
    (data_in[0], data_in[1]) = (0x25, 0x80);
    data_in[16..20].copy_from_slice(&command[16..20]);
    data_in[20..24].copy_from_slice(&[0xff; 4]);
    let pdu = peer.pdu_of(data_in, &vec![7; LEN as usize]);
    peer.stat_sn -= 1;
    let begun = world::now();
    for part in pdu.chunks(8192) {
        run_world(Duration::from_millis(500));
        peer.stream.write_all(part).unwrap();
        assert_eq!(peer.read(8192), 0, "{:?} later", world::now() - begun);
    }
    let took = world::now() - begun;
    assert!(
        took > 2 * crate::session::PING,
        "they arrive slowly: {took:?}"
    );
    peer.complete_command(&command);
    let end = block_on(read.as_mut());
    assert_eq!(end.result.unwrap().status, CONFLICT);
    assert!(world::accept_tcp().is_none(), "there is one connection");
    drop(read);
    client.shutdown();
}
