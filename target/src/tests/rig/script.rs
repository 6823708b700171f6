//! Commands, functions and responses of scripts that run for every protocol.

use std::sync::Arc;

use riser_scsi::config::{Config, Limits};
use riser_scsi::iscsi::pdu::{
    FromTarget, ScsiCommand, TaskAttr, TmfFunction, TmfRequest, TmfStatus,
};
use riser_scsi::iscsi::{CmdSn, Itt};
use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_test_peers::pdus::{cdb10, scsi_command, tmf_request};

use super::{Peer, Rig, windowed};
use crate::fabric::task_mgmt::{Function, FunctionResponse};
use crate::fabric::{LunMap, Mapping, TaskIdx, TaskRef, Unit, UnitIdx};
use crate::fixture::unit_config;
use crate::iscsi::TaskState;
use crate::worker::fabrics::Input;

/// A successful response to a command.
pub(crate) const GOOD: Outcome = Outcome::Status(0, None);

/// The response to a function that was executed.
pub(crate) const COMPLETE: Outcome = Outcome::Function(FunctionResponse::Complete);

/// A task of another worker.
pub(crate) const FOREIGN: TaskRef = TaskRef {
    worker: 9,
    channel: 9,
    index: TaskIdx(0),
    generation: 1,
};

/// A command whose data is in the memory with its tag as the key.
#[derive(Clone, Debug)]
pub(crate) struct Command {
    pub(crate) tag: u32,
    pub(crate) lun: u32,
    pub(crate) is_ordered: bool,
    pub(crate) cdb: Vec<u8>,
    /// The command writes.
    pub(crate) writes: bool,
    /// The initiator's buffer.
    pub(crate) data: Vec<u8>,
    /// The data is sent with the command.
    pub(crate) is_immediate: bool,
}

/// A command without data.
pub(crate) fn command(cdb: &[u8]) -> Command {
    Command {
        tag: 1,
        lun: 0,
        is_ordered: false,
        cdb: cdb.to_vec(),
        writes: false,
        data: Vec::new(),
        is_immediate: false,
    }
}

/// READ (10).
pub(crate) fn read10(lba: u32, blocks: u16) -> Command {
    command(&cdb10(0x28, lba, blocks)).into(usize::from(blocks) * 512)
}

/// WRITE (10).
pub(crate) fn write10(lba: u32, data: &[u8]) -> Command {
    command(&cdb10(0x2a, lba, (data.len() / 512) as u16)).out(data)
}

impl Command {
    pub(crate) fn tag(self, tag: u32) -> Self {
        Self { tag, ..self }
    }

    pub(crate) fn lun(self, lun: u32) -> Self {
        Self { lun, ..self }
    }

    pub(crate) fn ordered(mut self) -> Self {
        self.is_ordered = true;
        self
    }

    /// Reads up to `len` bytes.
    pub(crate) fn into(mut self, len: usize) -> Self {
        (self.writes, self.data) = (false, vec![0xee; len]);
        self
    }

    pub(crate) fn out(mut self, data: &[u8]) -> Self {
        (self.writes, self.data) = (true, data.to_vec());
        self
    }

    /// Sends the data with the command.
    pub(crate) fn immediate(mut self) -> Self {
        self.is_immediate = true;
        self
    }

    pub(super) fn immediate_data(&self) -> &[u8] {
        match self.is_immediate {
            true => &self.data,
            false => &[],
        }
    }

    pub(super) fn len(&self) -> u32 {
        self.data.len() as u32
    }

    pub(super) fn pdu(&self, cmd_sn: u32) -> ScsiCommand {
        let attribute = match self.is_ordered {
            true => TaskAttr::Ordered,
            false => TaskAttr::Simple,
        };
        ScsiCommand {
            attribute,
            lun: LunId::new(self.lun).unwrap().encode(),
            ..scsi_command(self.tag, cmd_sn, &self.cdb, self.writes, self.len())
        }
    }
}

/// A task management function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Management {
    pub(crate) tag: u32,
    pub(crate) lun: u32,
    pub(crate) function: Function,
    /// Tag of the task to abort.
    pub(crate) task: u32,
}

impl Management {
    pub(super) fn pdu(self, cmd_sn: u32) -> TmfRequest {
        let function = match self.function {
            Function::AbortTask => TmfFunction::AbortTask,
            Function::AbortTaskSet => TmfFunction::AbortTaskSet,
            Function::ClearTaskSet => TmfFunction::ClearTaskSet,
            Function::LogicalUnitReset => TmfFunction::LogicalUnitReset,
            Function::TargetWarmReset => TmfFunction::TargetWarmReset,
            other => unreachable!("{other:?} is not in a script"),
        };
        TmfRequest {
            lun: LunId::new(self.lun).unwrap().encode(),
            ref_cmd_sn: CmdSn(cmd_sn),
            ..tmf_request(self.tag, cmd_sn, function, self.task)
        }
    }
}

/// Response to a command or function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) tag: u32,
    pub(crate) outcome: Outcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Status, with the sense key, additional sense code and qualifier.
    Status(u8, Option<(u8, u8, u8)>),
    Function(FunctionResponse),
}

impl Outcome {
    pub(super) fn of_sense(status: u8, sense: Option<&[u8]>) -> Self {
        let sense = sense.filter(|sense| sense.len() > 13);
        Self::Status(status, sense.map(|s| (s[2] & 15, s[12], s[13])))
    }
}

pub(super) fn response_of(pdu: &FromTarget, data: &[u8]) -> Option<Response> {
    let (itt, outcome) = match pdu {
        FromTarget::ScsiResponse(response) => {
            let outcome = Outcome::of_sense(response.status, data.get(2..));
            (response.itt, outcome)
        }
        FromTarget::DataIn(pdu) => (pdu.itt, Outcome::Status(pdu.status?.status, None)),
        FromTarget::TmfResponse(response) => {
            let reply = match response.status {
                TmfStatus::Complete => FunctionResponse::Complete,
                TmfStatus::TaskDoesNotExist => FunctionResponse::NoSuchTask,
                TmfStatus::LunDoesNotExist => FunctionResponse::NoSuchLun,
                TmfStatus::NotSupported => FunctionResponse::NotSupported,
                TmfStatus::AuthorizationFailed => FunctionResponse::NotAuthorized,
                other => panic!("{other:?} is not in a script"),
            };
            (response.itt, Outcome::Function(reply))
        }
        _ => return None,
    };
    let Itt(tag) = itt;
    Some(Response { tag, outcome })
}

/// Scripts, where block operations wait for [`Rig::complete_all`], and everything else completes
/// immediately.
impl<P: Peer> Rig<P> {
    /// Returns a connection without pending unit attentions.
    pub(crate) fn start() -> Self {
        Self::start_with(&windowed(Limits::default().window))
    }

    /// Same as [`Rig::start`], with copies of this unit.
    pub(crate) fn start_with(config: &Config) -> Self {
        let mut rig = P::rig(config);
        rig.prompt = false;
        rig.stalled = false;
        rig.checks_keys = true;
        rig.add_session(P::NEXUS);
        rig
    }

    /// Adds a connection of another initiator, or of the first one.
    pub(crate) fn add_session(&mut self, nexus: u64) -> usize {
        let peer = P::connect(self, nexus);
        for lun in 0..self.units.len() {
            self.submit(peer, command(&[0; 6]).lun(lun as u32));
        }
        self.received.clear();
        peer
    }

    /// Sends a command.
    pub(crate) fn submit(&mut self, peer: usize, command: Command) {
        if !command.data.is_empty() {
            self.memory.insert(command.tag, command.data.clone());
        }
        P::send_command(self, peer, &command);
        self.pump();
    }

    /// Sends a command, and completes everything.
    pub(crate) fn run(&mut self, peer: usize, command: Command) -> Outcome {
        let tag = command.tag;
        self.submit(peer, command);
        self.complete_all();
        self.outcome(tag)
    }

    /// Sends a task management function for LUN 0.
    pub(crate) fn manage(&mut self, peer: usize, tag: u32, function: Function, task: u32) {
        self.manage_lun(peer, 0, tag, function, task);
    }

    pub(crate) fn manage_lun(
        &mut self,
        peer: usize,
        lun: u32,
        tag: u32,
        function: Function,
        task: u32,
    ) {
        let management = Management {
            tag,
            lun,
            function,
            task,
        };
        P::send_function(self, peer, management);
        self.pump();
    }

    /// Sends a task management function, and completes everything.
    pub(crate) fn run_function(&mut self, peer: usize, function: Function) -> Outcome {
        self.manage(peer, 99, function, 0);
        self.complete_all();
        self.outcome(99)
    }

    /// Passes the abort of a task by another nexus to its connection.
    pub(crate) fn abort(&mut self, task: TaskRef) {
        let watcher = TaskRef {
            generation: u32::MAX,
            ..task
        };
        let peer = self.peer_of(task).expect("a connection");
        self.pass(peer, Input::AbortTask { task, watcher });
    }

    /// Passes an input to a connection.
    pub(crate) fn pass(&mut self, peer: usize, input: Input) {
        P::input(self, peer, input);
        self.pump();
    }

    /// Provides the data that the initiators have withheld.
    pub(crate) fn provide_data(&mut self) {
        self.withholds_data = false;
        P::provide_data(self);
        self.pump();
    }

    /// Checks that the connection was closed because of its initiator.
    pub(crate) fn check_timed_out(&self) {
        assert!(self.in_error());
        assert_eq!(self.gate.events, P::TIMEOUT_EVENTS);
    }

    /// Returns the received responses.
    pub(crate) fn responses(&mut self) -> Vec<Response> {
        let received = std::mem::take(&mut self.received);
        let messages = received.iter().map(|(_, message)| message);
        messages.filter_map(P::response).collect()
    }

    /// Returns the tags of the received responses.
    pub(crate) fn tags(&mut self) -> Vec<u32> {
        self.responses().iter().map(|r| r.tag).collect()
    }

    /// Returns the tag and status of the received responses. The status of a completed function is
    /// 0.
    pub(crate) fn statuses(&mut self) -> Vec<(u32, u8)> {
        let of = |response: Response| match response.outcome {
            Outcome::Status(status, _) => (response.tag, status),
            Outcome::Function(FunctionResponse::Complete) => (response.tag, 0),
            other => panic!("{other:?}"),
        };
        self.responses().into_iter().map(of).collect()
    }

    /// Returns the only response, which must be for this tag.
    pub(crate) fn outcome(&mut self, tag: u32) -> Outcome {
        match self.responses()[..] {
            [response] if response.tag == tag => response.outcome,
            ref other => panic!("{other:?}"),
        }
    }

    /// Returns the state of each request of a connection, in the order of their tags.
    pub(crate) fn states(&self, peer: usize) -> Vec<TaskState> {
        let state = |tag| self.peers[peer].task_state(tag);
        (0..100).filter_map(state).collect()
    }

    /// Returns a map where LUN 0 was moved from another unit, and this unit.
    pub(crate) fn moved_lun(&self) -> (LunMap, Arc<Unit>) {
        let mut config = unit_config(2048);
        config.identity.serial = "another".into();
        let lu = LogicalUnit::new(config).unwrap();
        let before = Arc::new(Unit::new(UnitIdx(9), lu.into(), 4));
        let mapping = self.gate.mappings[0].clone();
        let unit = Arc::clone(&before);
        let old = Mapping {
            unit,
            ..mapping.clone()
        };
        let mut luns = LunMap::new([(LunId::ZERO, mapping)]);
        luns.follow(&LunMap::new([(LunId::ZERO, old)]));
        (luns, before)
    }
}

/// Runs scripts for every protocol.
macro_rules! scripts {
    ($($name:ident,)*) => {
        mod srp {
            $(#[test]
            fn $name() {
                super::$name::<crate::tests::rig::srp::SrpPeer>();
            })*
        }

        mod iser {
            $(#[test]
            fn $name() {
                super::$name::<crate::tests::rig::iser::IserPeer>();
            })*
        }

        mod tcp {
            $(#[test]
            fn $name() {
                super::$name::<crate::tests::rig::tcp::TcpPeer>();
            })*
        }
    };
}

pub(crate) use scripts;
