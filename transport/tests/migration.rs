//! Path migration (IBTA 17.2.8) between two devices with two addresses each, over an in-memory wire
//! with paths that are lossy, dead, or carry forged packets. Connections are established manually.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use riser_memory::Memory;
use riser_transport::loopback::{Blocked, Endpoint, Fabric, FabricConfig};
use riser_transport::roce::fault::FaultConfig;
use riser_transport::verbs::{
    Access, AhAttr, AltPath, AsyncEvent, Completion, CqId, Mr, Mtu, PathMigState, PdId,
    Provider as _, QpAttr, QpCap, QpId, QpInitAttr, QpState, QpType, RecvWr, RemoteAddr, SendOp,
    SendWr, Sge, SrqAttr, SrqId, Verbs as _, VerbsError, WcStatus, WrId,
};
use riser_transport::wire::{Bth, IcrcFlow, Opcode, Psn, Qpn, ROCE_PORT};

/// Memory size of each side, in bytes.
const REGION: usize = 2 << 20;
/// ACK timeout of both paths: 67 ms.
const TIMEOUT: u8 = 14;
/// Initial PSN of both directions.
const PSN: u32 = 0x00ff_fff0;

/// Returns the address of a device on a path.
fn addr(device: usize, path: u8) -> IpAddr {
    [127, 0, path, device as u8 + 1].into()
}

fn socket(device: usize, path: u8) -> SocketAddr {
    SocketAddr::new(addr(device, path), ROCE_PORT)
}

/// A device with a queue pair.
struct Side {
    device: Endpoint,
    pd: PdId,
    cq: CqId,
    memory: Memory,
    mr: Mr,
    qp: QpId,
    srq: Option<SrqId>,
}

impl Side {
    fn new(fabric: &Fabric, number: usize, qp_type: QpType) -> Self {
        let mut device = fabric.endpoint_with(&[0, 1, 2].map(|path| addr(number, path)));
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(256).unwrap();
        let memory = Memory::new(REGION).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE;
        let mr = device.reg_mr(pd, &memory.whole(), access).unwrap();
        let mut srq = None;
        let init = match qp_type {
            QpType::XrcTgt => {
                let xrcd = device.open_xrcd().unwrap();
                let attr = SrqAttr {
                    max_wr: 16,
                    max_sge: 1,
                    limit: 0,
                };
                srq = Some(device.create_xrc_srq(pd, xrcd, cq, attr).unwrap());
                QpInitAttr::xrc_target(xrcd)
            }
            _ => QpInitAttr {
                sq_sig_all: true,
                ..QpInitAttr::new(pd, cq, qp_type, QpCap::new(64, 64))
            },
        };
        let qp = device.create_qp(&init).unwrap();
        Self {
            device,
            pd,
            cq,
            memory,
            mr,
            qp,
            srq,
        }
    }

    fn sge(&self, offset: usize, length: usize) -> Sge {
        self.mr.sge(offset, length)
    }

    fn remote(&self, offset: usize) -> RemoteAddr {
        self.mr.remote(offset)
    }

    fn post(&mut self, wr_id: u64, op: SendOp, offset: usize, length: usize) {
        let sges = [self.sge(offset, length)];
        let wr = SendWr::new(wr_id, op, &sges);
        self.device.post_send(self.qp, &[wr]).unwrap();
    }

    fn recv(&mut self, wr_id: u64, offset: usize, length: usize) {
        let sges = [self.sge(offset, length)];
        let wr = RecvWr {
            wr_id: WrId(wr_id),
            sges: &sges,
        };
        match self.srq {
            Some(srq) => self.device.post_srq_recv(srq, &[wr]).unwrap(),
            None => self.device.post_recv(self.qp, &[wr]).unwrap(),
        }
    }

    fn modify(&mut self, attr: &QpAttr) -> Result<(), VerbsError> {
        self.device.modify_qp(self.qp, attr)
    }

    fn attr(&self) -> QpAttr {
        self.device.query_qp(self.qp).unwrap()
    }

    fn mig_state(&self) -> PathMigState {
        self.attr().path_mig_state.unwrap()
    }

    /// Returns the GID of the peer and the index of our address for the current path.
    fn path(&self) -> (IpAddr, u16) {
        let ah = self.attr().ah.unwrap();
        (ah.dgid.ip(), ah.sgid_index)
    }
}

/// Returns a path from a device to its peer.
fn ah(device: usize, path: u8) -> AhAttr {
    AhAttr {
        sgid_index: path.into(),
        ..AhAttr::new(addr(1 - device, path).into())
    }
}

fn alt_path(device: usize, path: u8) -> AltPath {
    AltPath {
        ah: ah(device, path),
        pkey_index: 0,
        timeout: TIMEOUT,
    }
}

fn rearm(device: usize, path: u8) -> QpAttr {
    QpAttr {
        alt_path: Some(alt_path(device, path)),
        path_mig_state: Some(PathMigState::Rearm),
        ..QpAttr::default()
    }
}

fn to(state: PathMigState) -> QpAttr {
    QpAttr {
        path_mig_state: Some(state),
        ..QpAttr::default()
    }
}

/// Number of packets with and without the MigReq bit, by source.
type Bits = Arc<Mutex<BTreeMap<IpAddr, [u64; 2]>>>;

struct Rig {
    fabric: Fabric,
    sides: [Side; 2],
    bits: Bits,
}

impl Rig {
    fn new(types: [QpType; 2], config: FabricConfig) -> Self {
        let fabric = Fabric::new(config);
        let mut number = 0..;
        let sides = types.map(|qp_type| Side::new(&fabric, number.next().unwrap(), qp_type));
        let bits = Bits::default();
        let seen = Arc::clone(&bits);
        fabric.tap(move |src, _, packet| {
            let has_bit = usize::from(packet[1] & 0x40 != 0);
            seen.lock().unwrap().entry(src.ip()).or_default()[has_bit] += 1;
        });
        let mut rig = Self {
            fabric,
            sides,
            bits,
        };
        for (device, qp_type) in types.into_iter().enumerate() {
            rig.connect(device, qp_type);
        }
        rig
    }

    fn rc() -> Self {
        Self::new([QpType::Rc; 2], FabricConfig::default())
    }

    fn connect(&mut self, device: usize, qp_type: QpType) {
        let other = &self.sides[1 - device];
        let dest_qp = other.device.qp_num(other.qp).unwrap();
        let is = |types: &[QpType]| types.contains(&qp_type);
        let is_responder = is(&[QpType::Rc, QpType::XrcTgt]);
        let is_requester = is(&[QpType::Rc, QpType::XrcIni]);
        let side = &mut self.sides[device];
        let init = QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Access::REMOTE),
            ..QpAttr::default()
        };
        side.modify(&init).unwrap();
        let rtr = QpAttr {
            state: Some(QpState::Rtr),
            ah: Some(ah(device, 0)),
            path_mtu: Some(Mtu::Mtu1024),
            dest_qp: Some(dest_qp),
            rq_psn: Some(PSN),
            max_dest_rd_atomic: is_responder.then_some(4),
            min_rnr_timer: is_responder.then_some(1),
            ..QpAttr::default()
        };
        side.modify(&rtr).unwrap();
        let rts = QpAttr {
            state: Some(QpState::Rts),
            sq_psn: Some(PSN),
            timeout: (is_responder || is_requester).then_some(TIMEOUT),
            retry_cnt: is_requester.then_some(1),
            rnr_retry: is_requester.then_some(7),
            max_rd_atomic: is_requester.then_some(4),
            ..QpAttr::default()
        };
        side.modify(&rts).unwrap();
    }

    /// Executes the next event until `limit`; returns false if no event is due.
    fn step(&mut self, limit: Instant) -> bool {
        let due = self.sides.iter().filter_map(|side| side.device.deadline());
        let Some(at) = due.min().filter(|at| *at <= limit) else {
            return false;
        };
        self.fabric.advance_to(at);
        let now = self.fabric.now();
        for side in &mut self.sides {
            side.device.progress(now);
        }
        true
    }

    fn run(&mut self, time: Duration) {
        let end = self.fabric.now() + time;
        while self.step(end) {}
        self.fabric.advance_to(end);
    }

    /// Returns the next completions of a device.
    fn completions(&mut self, device: usize, count: usize) -> Vec<Completion> {
        let end = self.fabric.now() + Duration::from_secs(60);
        let mut out = Vec::new();
        loop {
            let Side { device, cq, .. } = &mut self.sides[device];
            device.poll_cq(*cq, count - out.len(), &mut out).unwrap();
            if out.len() == count {
                return out;
            }
            assert!(self.step(end), "received only {} of {count}", out.len());
        }
    }

    fn status(&mut self, device: usize) -> WcStatus {
        self.completions(device, 1)[0].status
    }

    fn events(&mut self, device: usize) -> Vec<AsyncEvent> {
        let device = &mut self.sides[device].device;
        std::iter::from_fn(|| device.poll_async_event()).collect()
    }

    /// Loads the same path on both sides, and exchanges packets to arm it.
    fn arm(&mut self, path: u8) {
        for device in 0..2 {
            self.sides[device].modify(&rearm(device, path)).unwrap();
        }
        self.write(0);
        let states = [0, 1].map(|device| self.sides[device].mig_state());
        assert_eq!(states, [PathMigState::Armed; 2]);
    }

    /// Writes a few bytes from a device to its peer.
    fn write(&mut self, device: usize) {
        let remote = self.sides[1 - device].remote(64);
        self.sides[device].post(99, SendOp::Write(remote), 0, 8);
        assert_eq!(self.status(device), WcStatus::Success);
        self.run(Duration::from_micros(100));
    }

    /// Disconnects a path at both ends.
    fn cut(&self, path: u8) {
        for device in 0..2 {
            self.fabric.partition(addr(device, path), Blocked::BOTH);
        }
    }

    fn take_bits(&self) -> BTreeMap<IpAddr, [u64; 2]> {
        std::mem::take(&mut self.bits.lock().unwrap())
    }

    /// Checks that both sides have migrated to a path, and that each has reported it once.
    fn assert_migrated(&mut self, path: u8) {
        for device in 0..2 {
            let side = &self.sides[device];
            assert_eq!(side.mig_state(), PathMigState::Migrated, "{device}");
            assert_eq!(side.path(), (addr(1 - device, path), path.into()));
            assert_eq!(side.attr().alt_path, None);
            let qp = side.qp;
            assert_eq!(self.events(device), [AsyncEvent::PathMig(qp)], "{device}");
        }
    }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed | 1;
    let next = |_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    };
    (0..len).map(next).collect()
}

#[test]
fn migration_state_is_armed_by_packets() {
    let mut rig = Rig::rc();
    rig.write(0);
    let with_bit = rig.take_bits();
    assert!(with_bit.values().all(|[without, _]| *without == 0));
    assert_eq!(with_bit.len(), 2, "{with_bit:?}");

    rig.sides[0].modify(&rearm(0, 1)).unwrap();
    assert_eq!(rig.sides[0].mig_state(), PathMigState::Rearm);
    assert_eq!(rig.sides[0].attr().alt_path, Some(alt_path(0, 1)));
    rig.write(0);
    rig.write(1);
    assert_eq!(
        [0, 1].map(|device| rig.sides[device].mig_state()),
        [PathMigState::Rearm, PathMigState::Migrated],
        "the peer has no other path"
    );
    let bits = rig.take_bits();
    assert_eq!((bits[&addr(0, 0)][1], bits[&addr(1, 0)][0]), (0, 0));

    rig.sides[1].modify(&rearm(1, 1)).unwrap();
    rig.write(0);
    let states = [0, 1].map(|device| rig.sides[device].mig_state());
    assert_eq!(states, [PathMigState::Armed; 2]);
    assert!(rig.take_bits().values().all(|[_, with]| *with == 0));
    assert_eq!((rig.events(0), rig.events(1)), (vec![], vec![]));
}

/// Runs large transfers of both kinds in both directions. During these transfers, `change` changes
/// the path.
fn in_the_middle_of_transfers(change: impl FnOnce(&mut Rig)) -> Rig {
    let mut rig = Rig::rc();
    rig.arm(1);
    let length = REGION / 4;
    let data = [1, 2, 3, 4].map(|seed| pattern(seed, length));
    for (device, data) in data.chunks(2).enumerate() {
        let memory = &rig.sides[device].memory;
        memory.slice(0..length).unwrap().write(0, &data[0]);
        memory.slice(length..2 * length).unwrap().write(0, &data[1]);
    }
    for device in 0..2 {
        // Write the first quarter of this memory to the third of the peer, and read the second
        // quarter of the peer to the fourth of this memory.
        let write = SendOp::Write(rig.sides[1 - device].remote(2 * length));
        let read = SendOp::Read(rig.sides[1 - device].remote(length));
        let side = &mut rig.sides[device];
        side.post(1, write, 0, length);
        side.post(2, read, 3 * length, length);
    }
    rig.run(Duration::from_micros(100));
    for side in &mut rig.sides {
        assert_eq!(side.device.peek_cq(side.cq, 9), Ok(0), "too late");
    }
    change(&mut rig);
    for device in 0..2 {
        let done = rig.completions(device, 2);
        let status: Vec<_> = done.iter().map(|c| (c.wr_id.0, c.status)).collect();
        assert_eq!(status, [(1, WcStatus::Success), (2, WcStatus::Success)]);
        let got = |from: usize| rig.sides[device].memory.slice(from..from + length).unwrap();
        let peers = &data[2 * (1 - device)..];
        assert!(got(2 * length).to_vec() == peers[0], "what was written");
        assert!(got(3 * length).to_vec() == peers[1], "what was read");
    }
    rig
}

#[test]
fn dead_path_is_abandoned_without_loss() {
    let mut rig = in_the_middle_of_transfers(|rig| rig.cut(0));
    rig.run(Duration::from_secs(1));
    rig.assert_migrated(1);
    // Migrate back to the previous path.
    for device in 0..2 {
        rig.fabric.partition(addr(device, 0), Blocked::NONE);
    }
    rig.arm(0);
    rig.cut(1);
    rig.write(1);
    rig.assert_migrated(0);
}

#[test]
fn half_dead_path_is_abandoned() {
    for device in 0..2 {
        let blocked = Blocked {
            inbound: true,
            outbound: false,
        };
        let mut rig = in_the_middle_of_transfers(|rig| {
            rig.fabric.partition(addr(device, 0), blocked);
        });
        rig.run(Duration::from_secs(1));
        rig.assert_migrated(1);
    }
}

#[test]
fn path_migrates_on_command_during_transfers() {
    let mut rig = in_the_middle_of_transfers(|rig| {
        rig.sides[0].modify(&to(PathMigState::Migrated)).unwrap();
        assert_eq!(rig.sides[0].mig_state(), PathMigState::Migrated);
    });
    rig.assert_migrated(1);
    rig.take_bits();
    rig.write(0);
    let bits = rig.take_bits();
    assert!(bits.values().all(|[without, _]| *without == 0));
    assert!(bits.keys().all(|at| [addr(0, 1), addr(1, 1)].contains(at)));
}

#[test]
fn simultaneous_migration_succeeds() {
    let mut rig = in_the_middle_of_transfers(|rig| {
        for side in &mut rig.sides {
            side.modify(&to(PathMigState::Migrated)).unwrap();
        }
    });
    rig.assert_migrated(1);
}

#[test]
fn idle_peer_is_notified_of_migration() {
    for device in 0..2 {
        let mut rig = Rig::rc();
        rig.arm(1);
        rig.sides[device]
            .modify(&to(PathMigState::Migrated))
            .unwrap();
        rig.run(Duration::from_millis(1));
        rig.assert_migrated(1);
        rig.write(0);
        rig.write(1);
    }
}

#[test]
fn lossy_path_is_kept() {
    let mut rig = Rig::new(
        [QpType::Rc; 2],
        FabricConfig {
            faults: FaultConfig::percent(7, 3.0, 1.0, 1.0, 2.0),
            ..FabricConfig::default()
        },
    );
    for device in 0..2 {
        rig.sides[device].modify(&rearm(device, 1)).unwrap();
    }
    let length = 200_000;
    let data = pattern(5, length);
    let from = rig.sides[0].memory.slice(0..length).unwrap();
    from.write(0, &data);
    for wr_id in 0..8 {
        let remote = rig.sides[1].remote(REGION / 2);
        rig.sides[0].post(wr_id, SendOp::Write(remote), 0, length);
    }
    let done = rig.completions(0, 8);
    assert!(done.iter().all(|c| c.status.is_ok()));
    let got = rig.sides[1].memory.slice(REGION / 2..REGION / 2 + length);
    assert!(got.unwrap().to_vec() == data);
    for device in 0..2 {
        assert_eq!(rig.sides[device].mig_state(), PathMigState::Armed);
        assert_eq!(rig.events(device), []);
    }
}

#[test]
fn request_fails_after_retries_on_both_paths() {
    let mut rig = Rig::rc();
    rig.arm(1);
    rig.cut(0);
    rig.cut(1);
    let begin = rig.fabric.now();
    let remote = rig.sides[1].remote(0);
    rig.sides[0].post(1, SendOp::Write(remote), 0, 8);
    assert_eq!(rig.status(0), WcStatus::RetryExcErr);
    let took = rig.fabric.now() - begin;
    // Two intervals of three ACK timeouts on each path.
    assert!(took >= Duration::from_millis(67 * 12), "{took:?}");
    let qp = rig.sides[0].qp;
    assert_eq!(rig.events(0), [AsyncEvent::PathMig(qp)]);
    assert_eq!(rig.sides[0].attr().state, Some(QpState::Error));
    assert_eq!(rig.sides[1].mig_state(), PathMigState::Armed);
}

#[test]
fn dead_path_fails_connection_without_armed_peer() {
    let mut rig = Rig::rc();
    rig.sides[0].modify(&rearm(0, 1)).unwrap();
    rig.write(0);
    rig.cut(0);
    let remote = rig.sides[1].remote(0);
    rig.sides[0].post(1, SendOp::Write(remote), 0, 8);
    assert_eq!(rig.status(0), WcStatus::RetryExcErr);
    assert_eq!(rig.events(0), []);
}

#[test]
fn peer_with_rearmed_path_is_not_followed() {
    let mut rig = Rig::rc();
    rig.arm(1);
    // Side 1 returns to a single path. It still accepts packets with the bit on this path.
    rig.sides[1].modify(&to(PathMigState::Rearm)).unwrap();
    rig.sides[1].modify(&to(PathMigState::Migrated)).unwrap();
    assert_eq!(rig.sides[1].path(), (addr(0, 0), 0));
    rig.write(1);
    rig.write(0);
    assert_eq!(rig.sides[0].mig_state(), PathMigState::Armed);
    assert_eq!((rig.events(0), rig.events(1)), (vec![], vec![]));
    // Packets on the other path are dropped there.
    rig.sides[0].modify(&to(PathMigState::Migrated)).unwrap();
    let remote = rig.sides[1].remote(0);
    rig.sides[0].post(1, SendOp::Write(remote), 0, 8);
    assert_eq!(rig.status(0), WcStatus::RetryExcErr);
    assert_eq!(rig.events(1), []);
    let counters = rig.sides[1].device.qp_counters(rig.sides[1].qp).unwrap();
    assert!(counters.wrong_source > 0);
}

#[test]
fn peer_on_other_path_raises_event() {
    let mut rig = Rig::rc();
    rig.arm(1);
    // Side 1 has loaded path 1, but side 0 has loaded another path.
    let other = QpAttr {
        alt_path: Some(alt_path(0, 2)),
        ..QpAttr::default()
    };
    rig.sides[0].modify(&other).unwrap();
    rig.sides[0].modify(&to(PathMigState::Migrated)).unwrap();
    rig.run(Duration::from_millis(1));
    let qp = rig.sides[1].qp;
    assert_eq!(rig.events(1), [AsyncEvent::PathMigError(qp)]);
    assert_eq!(rig.sides[1].mig_state(), PathMigState::Armed);
    assert_eq!(rig.sides[1].path(), (addr(0, 0), 0));
}

/// Returns a SEND ONLY packet without data.
fn forge(rig: &Rig, from: SocketAddr, to: SocketAddr, psn: u32, has_bit: bool) -> Vec<u8> {
    let side = &rig.sides[1];
    let qpn = Qpn::new(side.device.qp_num(side.qp).unwrap());
    let bth = Bth::new(Opcode::RcSendOnly, qpn, Psn::new(psn)).with_migrated(has_bit);
    let mut packet = zerocopy_bytes(&bth);
    let icrc = IcrcFlow::new(from, to).unwrap().compute(&packet, 0);
    packet.extend_from_slice(&icrc.to_le_bytes());
    packet
}

fn zerocopy_bytes(bth: &Bth) -> Vec<u8> {
    riser_transport::wire::emit_headers(bth, &riser_transport::wire::ExtHeaders::default()).to_vec()
}

#[test]
fn forged_packet_does_not_migrate_connection() {
    let mut rig = Rig::rc();
    let inject = |rig: &mut Rig, path: u8, psn: u32, has_bit: bool| {
        let (from, to) = (socket(0, path), socket(1, path));
        let packet = forge(rig, from, to, psn, has_bit);
        rig.fabric.inject(from, to, packet);
        rig.run(Duration::from_millis(1));
    };
    let stays = |rig: &mut Rig, state| {
        assert_eq!(rig.sides[1].mig_state(), state);
        assert_eq!(rig.sides[1].path(), (addr(0, 0), 0));
        assert_eq!(rig.events(1), []);
    };
    // With a single path, this applies even to the next packet in sequence.
    inject(&mut rig, 1, PSN, true);
    stays(&mut rig, PathMigState::Migrated);
    rig.sides[1].modify(&rearm(1, 1)).unwrap();
    inject(&mut rig, 1, PSN, true);
    stays(&mut rig, PathMigState::Rearm);
    // On the current path without the bit, but with a PSN that the peer does not send.
    inject(&mut rig, 0, PSN ^ 0x80_0000, false);
    inject(&mut rig, 0, PSN + 7, false);
    stays(&mut rig, PathMigState::Rearm);
    rig.arm(1);
    let next = PSN + 1;
    inject(&mut rig, 1, next, false);
    stays(&mut rig, PathMigState::Armed);
    inject(&mut rig, 1, next + 7, true);
    inject(&mut rig, 1, next ^ 0x80_0000, true);
    inject(&mut rig, 2, next ^ 0x80_0000, true);
    stays(&mut rig, PathMigState::Armed);
    // An invalid ICRC.
    let (from, to) = (socket(0, 1), socket(1, 1));
    let mut packet = forge(&rig, from, to, next, true);
    *packet.last_mut().unwrap() ^= 1;
    rig.fabric.inject(from, to, packet);
    rig.run(Duration::from_millis(1));
    stays(&mut rig, PathMigState::Armed);
    // The connection works on its current path.
    rig.write(0);
    rig.write(1);
    // The peer's packet only differs from these in the path and the PSN.
    rig.sides[1].recv(1, 0, 8);
    inject(&mut rig, 1, next + 1, true);
    assert_eq!(rig.sides[1].mig_state(), PathMigState::Migrated);
}

/// One in 4096 PSNs would be accepted, so a stranger who knows the queue pair number could try
/// them.
#[test]
fn guessed_packets_move_no_connection() {
    let mut rig = Rig::rc();
    rig.arm(1);
    let (from, to) = (socket(0, 1), socket(1, 1));
    for n in 2..4200u32 {
        let psn = (PSN + (n << 12)) & 0xff_ffff;
        let packet = forge(&rig, from, to, psn, true);
        rig.fabric.inject(from, to, packet);
        rig.run(Duration::from_micros(10));
    }
    assert_eq!(rig.sides[1].mig_state(), PathMigState::Armed);
    // The connection works, and migrates on command.
    rig.write(0);
    rig.sides[1]
        .modify(&self::to(PathMigState::Migrated))
        .unwrap();
    assert_eq!(rig.sides[1].path(), (addr(0, 1), 1));
}

/// A peer can repeat packets that request a migration to another path.
#[test]
fn refused_migration_is_reported_once_per_path() {
    let mut rig = Rig::rc();
    rig.arm(1);
    let qp = rig.sides[1].qp;
    let (from, to) = (socket(0, 2), socket(1, 2));
    let mut events = Vec::new();
    for _ in 0..10 {
        let packet = forge(&rig, from, to, PSN, true);
        rig.fabric.inject(from, to, packet);
        rig.run(Duration::from_millis(1));
        events.extend(rig.events(1));
    }
    assert_eq!(events, [AsyncEvent::PathMigError(qp)]);
    assert_eq!(rig.sides[1].mig_state(), PathMigState::Armed);
}

#[test]
fn unreliable_connection_migrates() {
    let mut rig = Rig::new([QpType::Uc; 2], FabricConfig::default());
    for device in 0..2 {
        rig.sides[device].modify(&rearm(device, 1)).unwrap();
    }
    // There are no responses, so each side has to send.
    rig.write(0);
    rig.write(1);
    let states = [0, 1].map(|device| rig.sides[device].mig_state());
    assert_eq!(states, [PathMigState::Armed; 2]);
    rig.cut(0);
    rig.write(0);
    assert_eq!(rig.sides[1].mig_state(), PathMigState::Armed);
    rig.sides[0].modify(&to(PathMigState::Migrated)).unwrap();
    let data = pattern(3, 9000);
    let from = rig.sides[0].memory.slice(0..9000).unwrap();
    from.write(0, &data);
    let remote = rig.sides[1].remote(10_000);
    rig.sides[0].post(1, SendOp::Write(remote), 0, 9000);
    assert_eq!(rig.status(0), WcStatus::Success);
    rig.run(Duration::from_millis(1));
    rig.assert_migrated(1);
    let got = rig.sides[1].memory.slice(10_000..19_000).unwrap();
    assert!(got.to_vec() == data);
}

#[test]
fn extended_connection_migrates() {
    let mut rig = Rig::new([QpType::XrcIni, QpType::XrcTgt], FabricConfig::default());
    for device in 0..2 {
        rig.sides[device].modify(&rearm(device, 1)).unwrap();
    }
    let srqn = rig.sides[1]
        .device
        .srq_num(rig.sides[1].srq.unwrap())
        .unwrap();
    let send = |rig: &mut Rig, wr_id: u64| {
        rig.sides[1].recv(wr_id, 100, 64);
        let sges = [rig.sides[0].sge(0, 64)];
        let wr = SendWr {
            remote_srqn: Some(srqn),
            ..SendWr::new(wr_id, SendOp::Send, &sges)
        };
        let side = &mut rig.sides[0];
        side.device.post_send(side.qp, &[wr]).unwrap();
        assert_eq!(rig.status(0), WcStatus::Success);
        assert_eq!(rig.status(1), WcStatus::Success);
    };
    send(&mut rig, 1);
    let states = [0, 1].map(|device| rig.sides[device].mig_state());
    assert_eq!(states, [PathMigState::Armed; 2]);
    rig.cut(0);
    send(&mut rig, 2);
    rig.assert_migrated(1);
    // A target migrates on command as well, and then only responds on the new path.
    rig.arm_quietly(0);
    send(&mut rig, 3);
    for device in 0..2 {
        rig.fabric.partition(addr(device, 0), Blocked::NONE);
    }
    rig.sides[1].modify(&to(PathMigState::Migrated)).unwrap();
    rig.run(Duration::from_millis(1));
    rig.assert_migrated(0);
    send(&mut rig, 4);
}

impl Rig {
    fn arm_quietly(&mut self, path: u8) {
        for device in 0..2 {
            self.sides[device].modify(&rearm(device, path)).unwrap();
        }
    }
}

#[test]
fn attributes_of_migration_are_checked() {
    let mut rig = Rig::rc();
    let side = &mut rig.sides[0];
    let refused = |side: &mut Side, attr: &QpAttr| {
        let before = side.attr();
        let error = side.modify(attr).unwrap_err();
        assert_eq!(side.attr(), before, "a refused request changes nothing");
        error
    };
    let path = |change: fn(&mut AltPath)| {
        let mut path = alt_path(0, 1);
        change(&mut path);
        QpAttr {
            alt_path: Some(path),
            ..QpAttr::default()
        }
    };
    let invalid = VerbsError::InvalidParameter;
    assert_eq!(
        refused(side, &to(PathMigState::Rearm)),
        invalid("path_mig_state without an alternate path")
    );
    assert_eq!(
        refused(side, &to(PathMigState::Armed)),
        invalid("path_mig_state")
    );
    assert_eq!(
        refused(side, &path(|p| p.timeout = 32)),
        invalid("alternate timeout")
    );
    assert_eq!(
        refused(side, &path(|p| p.pkey_index = 1)),
        VerbsError::InvalidIndex(1)
    );
    assert_eq!(
        refused(side, &path(|p| p.ah.sgid_index = 3)),
        VerbsError::InvalidIndex(3)
    );
    assert_eq!(
        refused(side, &path(|p| p.ah.port = 2)),
        VerbsError::InvalidPort(2)
    );
    let v6: IpAddr = "fd00::1".parse().unwrap();
    let wrong = QpAttr {
        alt_path: Some(AltPath {
            ah: AhAttr::new(v6.into()),
            ..alt_path(0, 1)
        }),
        ..QpAttr::default()
    };
    assert_eq!(refused(side, &wrong), invalid("destination address"));
    // The initial state of a connection is Migrated.
    side.modify(&to(PathMigState::Migrated)).unwrap();
    side.modify(&path(|_| {})).unwrap();
    assert_eq!(side.attr().alt_path, Some(alt_path(0, 1)));
    assert_eq!(side.mig_state(), PathMigState::Migrated);
    side.modify(&to(PathMigState::Rearm)).unwrap();
    side.modify(&to(PathMigState::Migrated)).unwrap();
    assert_eq!(side.path(), (addr(1, 0), 0), "it was not armed");
    // RESET clears the alternate path.
    side.modify(&to(PathMigState::Rearm)).unwrap();
    let reset = QpAttr::to(QpState::Reset);
    side.modify(&reset).unwrap();
    let attr = side.attr();
    assert_eq!(
        (attr.alt_path, attr.path_mig_state),
        (None, Some(PathMigState::Migrated))
    );
    // A datagram queue pair has neither a path nor a migration state.
    let (pd, cq) = (side.pd, side.cq);
    let init = QpInitAttr::new(pd, cq, QpType::Ud, QpCap::new(1, 1));
    let ud = side.device.create_qp(&init).unwrap();
    assert_eq!(side.device.query_qp(ud).unwrap().path_mig_state, None);
    assert!(matches!(
        side.device.modify_qp(ud, &rearm(0, 1)),
        Err(VerbsError::InvalidTransition { .. } | VerbsError::ForbiddenAttribute { .. })
    ));
}

#[test]
fn path_is_loaded_before_rts() {
    let mut rig = Rig::rc();
    let dest = [0, 1].map(|device| {
        let side = &rig.sides[1 - device];
        side.device.qp_num(side.qp).unwrap()
    });
    for (device, side) in rig.sides.iter_mut().enumerate() {
        side.modify(&QpAttr::to(QpState::Reset)).unwrap();
        let init = QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Access::REMOTE),
            ..QpAttr::to(QpState::Init)
        };
        side.modify(&init).unwrap();
        let rtr = QpAttr {
            ah: Some(ah(device, 0)),
            alt_path: Some(alt_path(device, 1)),
            path_mtu: Some(Mtu::Mtu1024),
            dest_qp: Some(dest[device]),
            rq_psn: Some(PSN),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(1),
            ..QpAttr::to(QpState::Rtr)
        };
        side.modify(&rtr).unwrap();
        let rts = QpAttr {
            sq_psn: Some(PSN),
            timeout: Some(TIMEOUT),
            retry_cnt: Some(0),
            rnr_retry: Some(7),
            max_rd_atomic: Some(1),
            path_mig_state: Some(PathMigState::Rearm),
            ..QpAttr::to(QpState::Rts)
        };
        side.modify(&rts).unwrap();
    }
    rig.write(0);
    rig.cut(0);
    rig.write(0);
    rig.assert_migrated(1);
}

#[test]
fn draining_send_queue_keeps_attributes() {
    let mut rig = Rig::rc();
    let sqd = QpAttr::to(QpState::Sqd);
    let remote = rig.sides[1].remote(0);
    rig.sides[0].post(1, SendOp::Write(remote), 0, 100_000);
    rig.run(Duration::from_micros(15));
    rig.sides[0].modify(&sqd).unwrap();
    assert_eq!(rig.sides[0].attr().sq_draining, Some(true));
    let changed = QpAttr {
        ah: Some(ah(0, 1)),
        timeout: Some(10),
        ..sqd
    };
    assert_eq!(
        rig.sides[0].modify(&changed),
        Err(VerbsError::InvalidParameter("ah"))
    );
    assert_eq!(rig.status(0), WcStatus::Success);
    assert_eq!(rig.events(0), [], "it was not requested");
    assert_eq!(rig.sides[0].attr().sq_draining, Some(false));
    rig.sides[0].modify(&changed).unwrap();
    assert_eq!(rig.sides[0].path(), (addr(1, 1), 1));
    assert_eq!(rig.sides[0].attr().timeout, Some(10));
    // We also migrate the other side manually.
    rig.sides[1].modify(&sqd).unwrap();
    let changed = QpAttr {
        ah: Some(ah(1, 1)),
        ..sqd
    };
    rig.sides[1].modify(&changed).unwrap();
    let rts = QpAttr::to(QpState::Rts);
    for side in &mut rig.sides {
        side.modify(&rts).unwrap();
    }
    rig.cut(0);
    rig.write(0);
    rig.write(1);
}

/// Connections established by the connection manager, with a queue pair each.
mod managed {
    use riser_transport::verbs::{
        CmError, CmEventKind, CmId, CmOption, ConnParam, PortSpace, RdmaCm as _,
    };

    use super::*;

    const PORT: u16 = 4000;
    const WAIT: Duration = Duration::from_secs(1);

    struct Connection {
        rig: Rig,
        ids: [CmId; 2],
    }

    impl Connection {
        /// `offered` is the alternate path in the request. B only accepts alternate paths if
        /// `allows` is set.
        fn new(offered: Option<AltPath>, allows: bool, config: FabricConfig) -> Self {
            let mut rig = Rig::new([QpType::Rc; 2], config);
            let listener = {
                let device = &mut rig.sides[1].device;
                let listener = device.create_id(PortSpace::Tcp).unwrap();
                let at = SocketAddr::new(addr(1, 0), PORT);
                device.bind_addr(listener, at).unwrap();
                let option = CmOption::AlternatePaths(allows);
                device.set_option(listener, option).unwrap();
                device.listen(listener, 4).unwrap();
                listener
            };
            let a = {
                let device = &mut rig.sides[0].device;
                let id = device.create_id(PortSpace::Tcp).unwrap();
                let at = SocketAddr::new(addr(1, 0), PORT);
                device.resolve_addr(id, None, at, WAIT).unwrap();
                device.resolve_route(id, WAIT).unwrap();
                if let Some(path) = offered {
                    device.load_alternate_path(id, &path).unwrap();
                }
                id
            };
            assert_eq!(rig.cm_event(0), CmEventKind::AddrResolved);
            assert_eq!(rig.cm_event(0), CmEventKind::RouteResolved);
            rig.replace_qp(0, a);
            let param = ConnParam::default();
            rig.sides[0].device.connect(a, &param).unwrap();
            let b = rig.until("a request", |rig| {
                let event = rig.sides[1].device.poll_cm_event()?;
                assert!(matches!(event.kind, CmEventKind::ConnectRequest { .. }));
                Some(event.id)
            });
            // The attributes for queue pairs managed by their owner also contain the path, before
            // accepting.
            let rts = rig.sides[1].device.init_qp_attr(b, QpState::Rts).unwrap();
            assert_eq!(rts.alt_path.is_some(), offered.is_some() && allows);
            rig.replace_qp(1, b);
            rig.sides[1].device.accept(b, &param).unwrap();
            for device in 0..2 {
                let event = rig.cm_event(device);
                assert!(
                    matches!(event, CmEventKind::Established { .. }),
                    "{event:?}"
                );
            }
            rig.sides[1].device.destroy_id(listener).unwrap();
            Self { rig, ids: [a, b] }
        }

        fn load(&mut self, device: usize, path: AltPath) -> Result<(), CmError> {
            let id = self.ids[device];
            self.rig.sides[device].device.load_alternate_path(id, &path)
        }

        fn allow(&mut self, device: usize) {
            let option = CmOption::AlternatePaths(true);
            let id = self.ids[device];
            self.rig.sides[device]
                .device
                .set_option(id, option)
                .unwrap();
        }

        fn assert_loaded(&mut self, path: u8) {
            for device in 0..2 {
                let path = alt_path(device, path);
                let event = self.rig.cm_event(device);
                assert_eq!(event, CmEventKind::AlternatePath { path }, "{device}");
                let attr = self.rig.sides[device].attr();
                assert_eq!(attr.alt_path, Some(path));
                assert_ne!(attr.path_mig_state, Some(PathMigState::Migrated));
            }
        }

        fn refused(&mut self, device: usize, path: AltPath) -> Option<u8> {
            self.load(device, path).unwrap();
            let event = self.rig.cm_event(device);
            let CmEventKind::AlternatePathError { status } = event else {
                panic!("{event:?}");
            };
            assert_eq!(self.rig.sides[device].mig_state(), PathMigState::Migrated);
            status
        }

        /// Closes the connection over the remaining path.
        fn end(mut self) {
            self.rig.sides[0].device.disconnect(self.ids[0]).unwrap();
            for device in 0..2 {
                assert_eq!(self.rig.cm_event(device), CmEventKind::Disconnected);
            }
        }
    }

    impl Rig {
        fn until<T>(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> Option<T>) -> T {
            let end = self.fabric.now() + Duration::from_secs(60);
            loop {
                if let Some(done) = done(self) {
                    return done;
                }
                assert!(self.step(end), "no effect: {what}");
            }
        }

        fn cm_event(&mut self, device: usize) -> CmEventKind {
            self.until("an event of the RDMA CM", |rig| {
                Some(rig.sides[device].device.poll_cm_event()?.kind)
            })
        }

        /// Replaces the queue pair by the one connected by the connection manager.
        fn replace_qp(&mut self, device: usize, id: CmId) {
            let side = &mut self.sides[device];
            let init = QpInitAttr {
                sq_sig_all: true,
                ..QpInitAttr::new(side.pd, side.cq, QpType::Rc, QpCap::new(64, 64))
            };
            side.qp = side.device.create_cm_qp(id, &init).unwrap();
        }
    }

    fn connected(offered: Option<AltPath>, allows: bool) -> Connection {
        Connection::new(offered, allows, FabricConfig::default())
    }

    #[test]
    fn request_path_is_loaded_at_both_ends() {
        let mut c = connected(Some(alt_path(0, 1)), true);
        c.assert_loaded(1);
        c.rig.write(0);
        c.rig.cut(0);
        let remote = c.rig.sides[1].remote(0);
        c.rig.sides[0].post(1, SendOp::Write(remote), 0, 8);
        assert_eq!(c.rig.status(0), WcStatus::Success);
        c.rig.assert_migrated(1);
        // The connection manager uses the new path as well.
        c.end();
    }

    #[test]
    fn path_is_only_used_if_allowed() {
        let mut c = connected(Some(alt_path(0, 1)), false);
        for side in &c.rig.sides {
            let attr = side.attr();
            assert_eq!(attr.alt_path, None);
            assert_eq!(attr.path_mig_state, Some(PathMigState::Migrated));
        }
        assert_eq!(c.refused(0, alt_path(0, 1)), Some(2), "not supported");
        c.rig.write(0);
        c.end();
    }

    #[test]
    fn either_side_can_load_path() {
        let mut c = connected(None, true);
        c.load(0, alt_path(0, 1)).unwrap();
        c.assert_loaded(1);
        c.rig.write(0);
        let device = &mut c.rig.sides[1];
        assert_eq!(device.mig_state(), PathMigState::Armed);
        device.modify(&to(PathMigState::Migrated)).unwrap();
        c.rig.run(Duration::from_millis(1));
        c.rig.assert_migrated(1);
        // The other side loads another path, using the current path for all messages.
        c.rig.cut(0);
        c.allow(0);
        c.load(1, alt_path(1, 2)).unwrap();
        c.assert_loaded(2);
        c.rig.write(1);
        c.rig.cut(1);
        c.rig.write(0);
        c.rig.assert_migrated(2);
        c.end();
    }

    #[test]
    fn path_is_rejected_with_reason() {
        let mut c = connected(None, true);
        let elsewhere = AltPath {
            ah: AhAttr {
                sgid_index: 1,
                ..AhAttr::new(IpAddr::from([127, 0, 9, 9]).into())
            },
            ..alt_path(0, 1)
        };
        assert_eq!(c.refused(0, elsewhere), Some(8), "no GID of the peer's");
        assert_eq!(c.refused(0, alt_path(0, 0)), Some(5), "in use already");
        let wrong = AltPath {
            timeout: 99,
            ..alt_path(0, 1)
        };
        assert!(matches!(c.load(0, wrong), Err(CmError::Verbs(_))));
        // If both load a path at the same time, each rejects the other's request.
        c.allow(0);
        c.load(0, alt_path(0, 1)).unwrap();
        c.load(1, alt_path(1, 1)).unwrap();
        assert!(matches!(
            c.load(1, alt_path(1, 1)),
            Err(CmError::InvalidState(_))
        ));
        for device in 0..2 {
            let event = c.rig.cm_event(device);
            assert_eq!(event, CmEventKind::AlternatePathError { status: Some(3) });
        }
        // A later attempt succeeds.
        c.load(1, alt_path(1, 1)).unwrap();
        c.assert_loaded(1);
        c.end();
    }

    #[test]
    fn unresponsive_peer_leaves_connection_unchanged() {
        let mut c = connected(None, true);
        c.rig.cut(0);
        assert_eq!(c.refused(0, alt_path(0, 1)), None);
        for device in 0..2 {
            c.rig.fabric.partition(addr(device, 0), Blocked::NONE);
        }
        c.rig.write(0);
        c.load(0, alt_path(0, 1)).unwrap();
        c.assert_loaded(1);
        c.end();
    }

    #[test]
    fn lost_path_messages_are_retransmitted() {
        for seed in 0..8 {
            let mut c = connected(None, true);
            let faults = FaultConfig::percent(seed, 30.0, 10.0, 0.0, 10.0);
            c.rig.fabric.set_faults(faults);
            c.load(0, alt_path(0, 1)).unwrap();
            c.assert_loaded(1);
            c.rig.fabric.set_faults(FaultConfig::default());
            c.rig.write(0);
            c.rig.cut(0);
            c.rig.write(0);
            c.rig.assert_migrated(1);
            c.end();
        }
    }
}
