//! Fuzz target: the initiator with an iSER target that violates the protocol, with messages and
//! RDMA.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use proptest::prelude::*;
use riser_block::Buffer;
use riser_scsi::iscsi::BHS_LEN;
use riser_scsi::iser::{Buffers, HEADER_LEN, Message, RemoteBuffer, put_control};
use riser_scsi::lun::LunId;
use riser_testkit::{fuzz, one_of};
use riser_transport::verbs::{Provider, QpId, RKey, RdmaCm, RemoteAddr, SendOp, SendWr, Verbs};

use super::iser::{MESSAGE, Peer};
use super::*;
use crate::scsi::BlockRange;
use crate::url::IscsiUrl;

/// Length of each read in bytes.
const LEN: usize = 4096;

/// Number of commands per run.
const COMMANDS: usize = 16;

/// Bytes written by the target, and bytes written by the user of a buffer.
const ATTACK: u8 = 0xa7;
const OWN: u8 = 0x0e;

/// Size of the client's buffer pool in bytes.
const POOL: usize = 8 << 20;

/// Turns of the world until a message or an RDMA operation has arrived.
const TURNS: usize = 40;

/// Action of the target.
#[derive(Clone, Debug)]
enum Act {
    /// Sends a PDU with some valid fields.
    Pdu(Pdu),
    /// Sends arbitrary bytes.
    Noise(u8, [u64; 6]),
    /// Writes to the memory of a command or near it, or reads from there.
    Access {
        writes: bool,
        which: u8,
        at: u16,
        len: u16,
        key: u8,
    },
    /// The initiator starts a command.
    Submit,
    /// Advances the time, in ms.
    Wait(u16),
}

#[derive(Clone, Debug)]
struct Pdu {
    /// The command with its tag.
    which: u8,
    right: u8,
    len: u8,
    /// Key of the initiator to invalidate with the message, if any.
    invalidates: u8,
    bhs: [u64; 6],
}

fn act() -> impl Strategy<Value = Act> {
    let words = || prop::array::uniform6(any::<u64>());
    let pdu = (any::<[u8; 3]>(), 0..16_u8, words()).prop_map(
        |([which, right, len], invalidates, bhs)| {
            Act::Pdu(Pdu {
                which,
                right,
                len,
                invalidates,
                bhs,
            })
        },
    );
    let access = (any::<bool>(), any::<[u8; 2]>(), 0..4200_u16, 0..4200_u16);
    one_of![
        6 => pdu,
        1 => (any::<u8>(), words()).prop_map(|(len, words)| Act::Noise(len, words)),
        4 => access.prop_map(|(writes, [which, key], at, len)| Act::Access { writes, which, at, len, key }),
        4 => Just(Act::Submit),
        1 => (0..2000_u16).prop_map(Act::Wait),
    ]
}

fn bytes_of(words: &[u64; 6]) -> [u8; BHS_LEN] {
    let mut bytes = [0; BHS_LEN];
    for (at, word) in words.iter().enumerate() {
        bytes[8 * at..][..8].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// A command received by the target.
struct Seen {
    itt: [u8; 4],
    memory: RemoteBuffer,
}

struct Hostile {
    peer: Peer,
    qp: QpId,
    client: Client,
    session: Session,
    stat_sn: u32,
    exp_cmd_sn: u32,
    seen: Vec<Seen>,
    /// Outstanding commands of the initiator.
    futures: Vec<Pin<Box<IoFuture>>>,
    /// Memory of completed commands.
    returned: Vec<Buffer>,
}

impl Hostile {
    /// Returns a logged-in session.
    fn new() -> Self {
        world::clear();
        let mut peer = Peer::new(&[3260]);
        let ip = peer.nic.addr();
        let client = client();
        let url: IscsiUrl = format!("iser://{ip}/iqn.2026-01.com.example:disk/0")
            .parse()
            .unwrap();
        let mut connecting = begin(client.connect(&url));
        let (qp, mut request) = peer.accept();
        let mut stat_sn = 1;
        for text in [
            &b"AuthMethod=None\0"[..],
            b"RDMAExtensions=Yes\0InitialR2T=Yes\0",
        ] {
            let login: [u8; BHS_LEN] = request[HEADER_LEN..][..BHS_LEN].try_into().unwrap();
            let mut bhs = [0; BHS_LEN];
            (bhs[0], bhs[1]) = (0x23, login[1]);
            bhs[8..14].copy_from_slice(&login[8..14]);
            bhs[15] = 1;
            bhs[16..20].copy_from_slice(&login[16..20]);
            bhs[24..28].copy_from_slice(&u32::to_be_bytes(stat_sn));
            bhs[28..32].copy_from_slice(&login[24..28]);
            bhs[35] = 64;
            stat_sn += 1;
            let mut message = Vec::new();
            put_control(Buffers::default(), bhs, &[], text, &mut message);
            peer.post_recv(qp);
            send(&mut peer, qp, &message, None);
            if stat_sn == 2 {
                request = peer.wait("a second request", |peer| peer.poll(qp));
            }
        }
        let mut cx = Context::from_waker(Waker::noop());
        let session = peer.wait("a session", |_| match connecting.as_mut().poll(&mut cx) {
            Poll::Ready(session) => Some(session.unwrap()),
            Poll::Pending => None,
        });
        drop(connecting);
        Self {
            peer,
            qp,
            client,
            session,
            stat_sn,
            exp_cmd_sn: 1,
            seen: Vec::new(),
            futures: Vec::new(),
            returned: Vec::new(),
        }
    }

    /// Returns the memory of a command received by the target.
    fn seen(&self, which: u8) -> Option<&Seen> {
        let len = self.seen.len();
        self.seen.get(usize::from(which) % len.max(1))
    }

    fn act(&mut self, act: &Act) {
        match act {
            Act::Pdu(pdu) => self.send_pdu(pdu),
            Act::Noise(len, words) => {
                let bytes = bytes_of(words);
                self.send(&bytes[..usize::from(*len) % (BHS_LEN + 1)], None);
            }
            Act::Access {
                writes,
                which,
                at,
                len,
                key,
            } => self.access(*writes, *which, (*at, *len), *key),
            Act::Submit => self.submit(),
            Act::Wait(ms) => {
                let until = world::now() + Duration::from_millis(u64::from(*ms));
                while world::now() < until {
                    self.peer.nic.progress(world::now());
                    world::step(Some(until));
                }
            }
        }
        self.poll_completions();
    }

    fn submit(&mut self) {
        if self.futures.len() >= COMMANDS {
            return;
        }
        let Some(buffer) = self.client.buffers().try_take(LEN) else {
            return;
        };
        let range = BlockRange { lba: 0, blocks: 8 };
        let command = Command::read(range, LEN as u32);
        let lun = LunId::new(0).unwrap();
        let io = ScsiIo::new(lun, command, IoData::One(buffer), Duration::from_secs(30));
        self.futures.push(Box::pin(self.session.submit(io)));
        self.turn();
    }

    /// Sends a message, and waits for its arrival.
    fn send(&mut self, message: &[u8], invalidates: Option<RKey>) {
        send(&mut self.peer, self.qp, message, invalidates);
        self.turn();
    }

    fn send_pdu(&mut self, pdu: &Pdu) {
        let mut bhs = bytes_of(&pdu.bhs);
        let is_right = |bit: u8| pdu.right & 1 << bit != 0;
        if is_right(0) {
            let opcodes = [0x20, 0x21, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x31, 0x32];
            bhs[0] = opcodes[usize::from(bhs[0]) % opcodes.len()];
        }
        if let Some(seen) = self.seen(pdu.which).filter(|_| is_right(1)) {
            bhs[16..20].copy_from_slice(&seen.itt);
        }
        if is_right(2) {
            // Final, no residual, GOOD.
            bhs[1..4].copy_from_slice(&[0x80, 0, 0]);
            bhs[36..48].fill(0);
        }
        if is_right(3) {
            bhs[24..28].copy_from_slice(&self.stat_sn.to_be_bytes());
            self.stat_sn += 1;
        }
        if is_right(4) {
            bhs[28..32].copy_from_slice(&self.exp_cmd_sn.to_be_bytes());
            bhs[32..36].copy_from_slice(&(self.exp_cmd_sn + 63).to_be_bytes());
        }
        let data = vec![pdu.which; usize::from(if is_right(5) { 0 } else { pdu.len })];
        let mut message = Vec::new();
        put_control(Buffers::default(), bhs, &[], &data, &mut message);
        let key = self.seen(pdu.invalidates).map(|seen| seen.memory.stag.0);
        let key = key.filter(|_| pdu.invalidates < 8).map(RKey);
        self.send(&message, key);
    }

    /// Uses a key of the initiator: the right one, or a similar one.
    fn access(&mut self, writes: bool, which: u8, (at, len): (u16, u16), key: u8) {
        let Some(memory) = self.seen(which).map(|seen| seen.memory) else {
            return;
        };
        let near = if key < 192 { 0 } else { 1 << (key % 32) };
        let remote = RemoteAddr {
            addr: memory.base.wrapping_add(at.into()),
            rkey: RKey(memory.stag.0 ^ near),
        };
        let op = match writes {
            true => SendOp::Write(remote),
            false => SendOp::Read(remote),
        };
        self.peer.memory.write(MESSAGE as usize, &[ATTACK; LEN]);
        let sges = [self.peer.sge(MESSAGE, u32::from(len) % LEN as u32)];
        let wr = SendWr::new(1, op, &sges);
        // After a connection error, this fails.
        let _ = self.peer.nic.post_send(self.qp, &[wr]);
        self.turn();
    }

    /// Advances the world for a while, and receives the messages of the initiator.
    fn turn(&mut self) {
        for _ in 0..TURNS {
            let now = world::now();
            self.peer.nic.progress(now);
            while self.peer.nic.poll_cm_event().is_some() {}
            if let Some(message) = self.peer.poll(self.qp) {
                self.record_command(&message);
                self.peer.post_recv(self.qp);
            }
            world::step(Some(now + Duration::from_micros(100)));
        }
    }

    fn record_command(&mut self, message: &[u8]) {
        let Ok(Message::Control { buffers, frame }) = Message::parse(message) else {
            panic!("the initiator sends what is legal: {message:02x?}");
        };
        // A command without the immediate flag.
        if frame.bhs[0] == 0x01 {
            self.exp_cmd_sn += 1;
            let memory = buffers.read.expect("a read has memory");
            let itt = frame.bhs[16..20].try_into().unwrap();
            self.seen.push(Seen { itt, memory });
        }
    }

    /// Polls for completed commands. Their memory belongs to the user again, who writes to it.
    fn poll_completions(&mut self) {
        let mut cx = Context::from_waker(Waker::noop());
        self.futures.retain_mut(|future| {
            let Poll::Ready(end) = future.as_mut().poll(&mut cx) else {
                return true;
            };
            self.returned.extend(reclaim_buffer(end));
            false
        });
    }

    /// Verifies that all commands complete, and that the target has not written to returned memory.
    fn shut_down(mut self) {
        self.client.shutdown();
        for future in std::mem::take(&mut self.futures) {
            self.returned.extend(reclaim_buffer(block_on(future)));
        }
        for buffer in &self.returned {
            assert!(buffer.slice().to_vec() == [OWN; LEN], "written to later");
        }
        drop((self.session, self.returned));
        assert_eq!(self.client.buffers().free(), POOL);
    }
}

/// Returns the memory of a completed command, after its user has written to it.
fn reclaim_buffer(completion: IoCompletion) -> Option<Buffer> {
    let IoData::One(buffer) = completion.data else {
        panic!("the memory that was given comes back");
    };
    buffer.slice().fill(0, LEN, OWN);
    Some(buffer)
}

fn send(peer: &mut Peer, qp: QpId, message: &[u8], invalidates: Option<RKey>) {
    peer.memory.write(MESSAGE as usize, message);
    let sges = [peer.sge(MESSAGE, message.len() as u32)];
    let op = invalidates.map_or(SendOp::Send, SendOp::SendInv);
    let wr = SendWr::new(1, op, &sges);
    let _ = peer.nic.post_send(qp, &[wr]);
}

/// For any behavior of the target, all commands complete, and after that the target cannot access
/// their memory.
fn run(acts: &[Act]) {
    let mut hostile = Hostile::new();
    hostile.submit();
    for act in acts.iter().take(32) {
        hostile.act(act);
    }
    hostile.shut_down();
    world::clear();
}

#[test]
fn hostile_iser_target() {
    bolero::check!(name = "hostile_iser_target").for_each(|bytes: &[u8]| {
        if let Some(((), acts)) = fuzz::history(&Just(()), &act(), bytes) {
            run(&acts);
        }
    });
}

/// The target of this fuzz test can complete a command, and write to its memory before that.
#[test]
fn target_can_complete_read() {
    let mut hostile = Hostile::new();
    hostile.submit();
    assert_eq!(hostile.seen.len(), 1);
    hostile.access(true, 0, (0, 4095), 0);
    hostile.send_pdu(&Pdu {
        which: 0,
        right: 0x3f,
        len: 0,
        invalidates: 0,
        bhs: [1; 6],
    });
    let mut cx = Context::from_waker(Waker::noop());
    let ended = hostile.futures[0].as_mut().poll(&mut cx);
    let Poll::Ready(end) = ended else {
        panic!("no response");
    };
    let buffer = &end.data.buffers()[0];
    assert_eq!(buffer.slice().to_vec()[..4095], [ATTACK; 4095]);
    // Too late: the key is invalid.
    buffer.slice().fill(0, LEN, OWN);
    hostile.access(true, 0, (0, 4095), 0);
    assert_eq!(buffer.slice().to_vec(), [OWN; LEN]);
    hostile.futures.clear();
    drop(end);
    hostile.shut_down();
    world::clear();
}
