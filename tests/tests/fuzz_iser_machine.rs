//! Fuzz target for an active iSER connection. The input selects actions, such as messages of any
//! type, completions in order, time steps, and all ways to close the connection. There must not be
//! a panic, queues must be limited, and all resources must be released at the end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_memory::Memory;
use riser_scsi::config::{BlockSize, Config, Identity as UnitIdentity, Limits, Provisioning};
use riser_scsi::data::designator::Naa;
use riser_scsi::iscsi::frame::{self, Digests};
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::{Auth, CompletedLogin, Identity, LoginFault, Refusal, Terms};
use riser_scsi::iscsi::name::{DiscoveredTarget, IscsiName};
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::iscsi::{Cid, CmdSn, Tsih};
use riser_scsi::iser::{Buffers, Header, RemoteBuffer, Stag};
use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::{Nexus, NexusId, PortName, TargetPort};
use riser_scsi::step::{BackendError, StepResult};
use riser_target::fabric::{LunMap, Mapping, TaskAction, TaskIdx, Unit, UnitIdx};
use riser_target::iscsi::{
    Action, Cx, Datamover as _, Ending, Gate, LoginGrant, MAX_QUEUED, SpareTasks, Window,
};
use riser_target::iser::{
    ChainIdx, ConnState, IserAction, IserChannel, IserConfig, IserParams, Post, RxIdx,
};
use riser_target::pool::Pool;
use riser_target::stats::{LunStats, SessionEvent};

const WINDOW: u16 = 4;
const NEXUS: NexusId = NexusId(3);

struct Open(Arc<Unit>);

impl Gate for Open {
    fn admit(&mut self, _: &Identity) -> Result<Terms, Refusal> {
        Ok(Terms {
            offer: Offer::default()
                .with(Key::RdmaExtensions, 1)
                .with(Key::InitialR2T, 0),
            auth: Auth::None,
            portal_group: 1,
        })
    }

    fn join(&mut self, joined: &CompletedLogin, first: CmdSn) -> Result<LoginGrant, LoginStatus> {
        let mapping = Mapping {
            unit: Arc::clone(&self.0),
            stats: Arc::new(LunStats::new("t", 0, None)),
            read_only: false,
        };
        let luns = LunMap::new([(LunId::ZERO, mapping)]);
        Ok(LoginGrant {
            tsih: Tsih(1),
            nexus: (!joined.session.discovery).then(|| (NEXUS, Arc::new(luns))),
            params: joined.session,
            window: Arc::new(Window::new(WINDOW, first, false)),
            waits: false,
        })
    }

    fn refused(
        &mut self,
        _: LoginStatus,
        _: Option<&Identity>,
        _: Option<&LoginFault>,
        _: Option<&str>,
    ) {
    }

    fn stop_waiting(&mut self) {}

    fn count(&mut self, _: SessionEvent) {}

    fn end_other(&mut self, _: Cid, _: Ending) -> bool {
        false
    }

    fn random(&mut self, out: &mut [u8]) {
        out.fill(7);
    }

    fn targets(&mut self, _: &IscsiName, _: Option<&IscsiName>) -> Vec<DiscoveredTarget> {
        Vec::new()
    }
}

fn unit() -> Arc<Unit> {
    let lu = LogicalUnit::new(Config {
        blocks: 2048,
        block_size: BlockSize::B512,
        protection: None,
        physical_exponent: 0,
        read_only: false,
        provisioning: Provisioning::Thick,
        write_cache: true,
        stoppable: false,
        rotational: false,
        identity: UnitIdentity {
            vendor: "RISER".into(),
            product: "TEST".into(),
            revision: "1".into(),
            serial: "1".into(),
            naa: Naa::LocallyAssigned(1),
        },
        limits: Limits {
            // Small enough so that most commands are split.
            window: 4096,
            ..Limits::default()
        },
        cache_generation: None,
        threshold: None,
    })
    .unwrap();
    let port = |name: &str| PortName::Iscsi(name.into());
    let target = TargetPort {
        name: port("iqn.2026-01.a:t,t,0x0001"),
        relative_id: 1,
        group: 0,
    };
    let initiator = port("iqn.2026-01.a:i,i,0x000000000000");
    lu.add_nexus(NEXUS, Nexus { initiator, target });
    Arc::new(Unit::new(UnitIdx(0), Arc::new(lu), 64))
}

/// A worker with a single connection. This is similar to `target/src/iser/fixture.rs`, which can't
/// be used here: in that fixture, the device moves data, and an invalid key or address from the
/// initiator fails the test. Here the input can be arbitrary, so we don't move any data and only
/// check the limits.
struct Rig {
    now: Instant,
    pool: Pool,
    spare: SpareTasks,
    gate: Open,
    conn: IserChannel,
    receives: VecDeque<RxIdx>,
    chains: VecDeque<ChainIdx>,
    blocks: Vec<TaskIdx>,
    in_error: bool,
    released: bool,
}

impl Rig {
    fn new() -> Self {
        let now = Instant::now();
        let params = IserParams {
            send_queue: 17,
            remote_invalidate: true,
            ..IserParams::new(WINDOW)
        };
        let memory = params.memory();
        let conn = IserChannel::new(
            IserConfig {
                params,
                worker: 0,
                serial: 1,
                receive_ring: Memory::new(memory.receive_ring).unwrap().whole(),
                send_ring: Memory::new(memory.send_ring).unwrap().whole(),
            },
            now,
        );
        let mut rig = Self {
            now,
            pool: Pool::new(2 << 20).unwrap(),
            spare: SpareTasks::default(),
            gate: Open(unit()),
            conn,
            receives: VecDeque::new(),
            chains: VecDeque::new(),
            blocks: Vec::new(),
            in_error: false,
            released: false,
        };
        rig.with(IserChannel::handle_established);
        rig
    }

    fn with(&mut self, input: impl FnOnce(&mut IserChannel, &mut Cx<'_>)) {
        self.step(input);
        let mut post = Post::default();
        loop {
            if let Some(action) = self.conn.poll_action() {
                self.carry_out(action);
            } else if self.conn.poll_post(self.now, &mut post) {
                self.chains.push_back(post.chain);
            } else {
                break;
            }
        }
        let bound = MAX_QUEUED + self.conn.params().receives() as usize;
        assert!(self.conn.channel().mover().queued() <= bound);
    }

    fn step(&mut self, input: impl FnOnce(&mut IserChannel, &mut Cx<'_>)) {
        let mut cx = Cx {
            now: self.now,
            pool: &mut self.pool,
            spare: &mut self.spare,
            gate: &mut self.gate,
        };
        input(&mut self.conn, &mut cx);
    }

    fn carry_out(&mut self, action: IserAction) {
        match action {
            IserAction::PostRecv(rx) => self.receives.push_back(rx),
            IserAction::NotifyEstablished => {}
            IserAction::Disconnect => self.in_error = true,
            IserAction::Release => self.released = true,
            IserAction::Channel(action) => match action {
                Action::Task(TaskAction::SubmitBlock { task, .. }) => self.blocks.push(task),
                Action::Task(TaskAction::AbortBlock(task)) => {
                    let at = self.blocks.iter().position(|t| *t == task).unwrap();
                    self.blocks.remove(at);
                    self.block_done(task, StepResult::Failed(BackendError::Aborted));
                }
                Action::Task(TaskAction::StartTask(name)) => {
                    self.step(|c, cx| c.input(cx, |ch, cx| ch.handle_task_start(cx, name)));
                }
                Action::Task(TaskAction::AbortTask { task, watcher }) => {
                    self.step(|c, cx| c.input(cx, |ch, cx| ch.handle_abort(cx, task, watcher)));
                }
                Action::Task(TaskAction::TaskGone(name)) => {
                    self.step(|c, cx| c.input(cx, |ch, cx| ch.handle_task_gone(cx, name)));
                }
                _ => {}
            },
        }
    }

    fn block_done(&mut self, task: TaskIdx, result: StepResult) {
        self.step(|c, cx| c.input(cx, |ch, cx| ch.handle_block_done(cx, task, result)));
    }

    fn send(&mut self, bytes: &[u8]) {
        if let Some(rx) = self.receives.pop_front() {
            let bytes = &bytes[..bytes.len().min(self.conn.receive_slot(rx).len())];
            self.with(|c, cx| c.handle_recv(cx, rx, bytes));
        }
    }

    /// Sends a PDU, using the given bytes for the start and end of its header.
    fn pdu(&mut self, first: &[u8; 2], rest: &[u8], data: &[u8]) {
        let mut bhs = [0; 48];
        bhs[..2].copy_from_slice(first);
        let len = rest.len().min(40);
        bhs[8..8 + len].copy_from_slice(&rest[..len]);
        let buffer = Some(RemoteBuffer {
            stag: Stag(1),
            base: 0x1000,
        });
        let header = Header::Control(Buffers {
            write: buffer,
            read: buffer,
        });
        let mut bytes = header.bytes().to_vec();
        frame::put_pdu(bhs, &[], data, Digests::default(), &mut bytes);
        self.send(&bytes);
    }

    fn log_in(&mut self) {
        let text = b"InitiatorName=iqn.2026-01.a:i\0TargetName=iqn.2026-01.a:t\0\
            RDMAExtensions=Yes\0InitialR2T=No\0";
        let mut rest = [0; 40];
        // CmdSN 1.
        rest[19] = 1;
        self.pdu(&[0x43, 0x87], &rest, text);
        assert_eq!(self.conn.state(), ConnState::FullFeature);
    }

    fn end_chain(&mut self) {
        if let Some(chain) = self.chains.pop_front() {
            let ok = !self.in_error;
            self.with(|c, cx| c.handle_post_done(cx, chain, ok));
        }
    }

    fn end(mut self) {
        if !self.in_error {
            self.with(IserChannel::handle_disconnected);
        }
        while !self.chains.is_empty() {
            self.end_chain();
        }
        while let Some(rx) = self.receives.pop_front() {
            self.with(|c, cx| c.handle_recv_flushed(cx, rx));
        }
        while let Some(task) = self.blocks.pop() {
            self.block_done(task, StepResult::Done);
        }
        self.with(IserChannel::handle_drained);
        assert!(self.released, "{:?}", self.conn);
        assert_eq!(self.pool.free(), self.pool.size());
        assert_eq!(self.gate.0.tasks(), 0);
    }
}

#[test]
fn machine() {
    bolero::check!().for_each(|bytes: &[u8]| {
        let mut rig = Rig::new();
        let mut cmd_sn = 1_u32;
        // Skip the login for some inputs, so that the target has to handle PDUs received before a
        // login.
        if bytes.first().is_some_and(|b| b & 3 != 0) {
            rig.log_in();
        }
        for step in bytes.chunks(12) {
            if rig.in_error {
                break;
            }
            let (kind, rest) = (step[0], &step[1..]);
            let at = |i: usize| rest.get(i).copied().unwrap_or(0);
            match kind % 12 {
                // A READ or WRITE command with the next sequence number.
                0..=3 => {
                    let is_write = kind & 16 != 0;
                    let mut head = [0; 40];
                    head[11] = at(0) % 8;
                    let len = u32::from(at(1) % 64) * 512;
                    head[12..16].copy_from_slice(&len.to_be_bytes());
                    head[16..20].copy_from_slice(&cmd_sn.to_be_bytes());
                    head[24] = if is_write { 0x2a } else { 0x28 };
                    head[32] = at(1) % 64;
                    cmd_sn = cmd_sn.wrapping_add(1);
                    let flags = if is_write { 0x20 } else { 0x40 } | at(2) & 0x80;
                    let immediate = usize::from(at(3)).min(len as usize);
                    let immediate = if is_write { immediate } else { 0 };
                    rig.pdu(&[0x01, flags], &head, &vec![1; immediate]);
                }
                // Unsolicited data.
                4 => {
                    let mut head = [0; 40];
                    head[11] = at(0) % 8;
                    head[12..16].fill(0xff);
                    head[31] = at(1);
                    head[35] = at(2);
                    rig.pdu(&[0x05, at(3) & 0x80], &head, &[2; 200]);
                }
                // A task management request or NOP, using the next bytes of the input.
                5 => rig.pdu(
                    &[0x42, 0x80 | (at(0) % 9)],
                    &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, at(1)],
                    &[],
                ),
                6 => rig.pdu(&[0x40, 0x80], &[0; 12], rest),
                // An arbitrary opcode.
                7 => rig.pdu(&[at(0), at(1)], rest, rest),
                8 => rig.send(rest),
                9 => {
                    if let Some(task) = rig.blocks.pop() {
                        rig.block_done(task, StepResult::Done);
                        rig.with(|_, _| {});
                    }
                }
                10 => rig.end_chain(),
                _ => {
                    rig.now += Duration::from_secs(u64::from(at(0) % 16));
                    rig.with(IserChannel::handle_timeout);
                }
            }
        }
        rig.end();
    });
}
