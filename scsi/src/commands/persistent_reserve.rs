//! PERSISTENT RESERVE IN and OUT (SPC-4 6.15, 6.16).
//!
//! What changes reservations waits for no other command. PREEMPT AND ABORT has the commands of the
//! preempted nexuses aborted when it has taken effect, and is answered when they are gone.

use super::plan::{Context, Next, Plan, PlanResult, Planner, Steps};
use crate::access::copy_out;
use crate::cdb::Cdb;
use crate::nexus::PortName;
use crate::reservation::{
    Action, Keys, ReservationChange, ReservationError, ReservationType, Reservations,
};
use crate::sense::{AdditionalSense, Sense, SenseKey};
use crate::step::{BlockOp, DataIn, StepResult};

/// Length of the parameter list of PERSISTENT RESERVE OUT.
const LIST: u32 = 24;

/// A PERSISTENT RESERVE OUT.
///
/// ```text
/// parameters arrive -> (answer)
///                  \-> the change is saved -> preempted commands are aborted -> (answer)
/// ```
#[derive(Debug)]
pub(crate) struct ReserveOut {
    /// The service action; a registration's APTPL bit comes with the parameters.
    action: Action,
}

/// Bits of byte 20 of the parameter list.
const SPEC_I_PT: u8 = 3;
const ALL_TG_PT: u8 = 2;
const APTPL: u8 = 0;

/// PERSISTENT RESERVE OUT.
pub(crate) fn plan_out<M: From<ReserveOut>>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let kind = ReservationType::try_from(cdb.byte(2) & 0x0f).ok();
    let is_unit = cdb.byte(2) >> 4 == 0;
    let scoped = || {
        if !is_unit {
            return Err(Sense::cdb_field(2, Some(7)));
        }
        kind.ok_or(Sense::cdb_field(2, Some(3)))
    };
    let action = match cdb.byte(1) & 0x1f {
        0 => Action::Register {
            ignore: false,
            persists: false,
        },
        1 => Action::Reserve(scoped()?),
        2 => Action::Release(kind.filter(|_| is_unit)),
        3 => Action::Clear,
        action @ (4 | 5) => Action::Preempt {
            kind: scoped()?,
            aborts: action == 5,
        },
        _ => Action::Register {
            ignore: true,
            persists: false,
        },
    };
    let len = cdb.be32(5);
    if len != LIST {
        return Err(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    planner.list(len, ReserveOut { action }.into())
}

impl ReserveOut {
    /// The change that the parameters ask for.
    fn parse(&mut self, context: &Context<'_>) -> Result<ReservationChange, Sense> {
        let mut list = [0; LIST as usize];
        copy_out(context.data, 0, &mut list);
        let be64 = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&list[at..at + 8]);
            u64::from_be_bytes(bytes)
        };
        let has = |bit: u8| list[20] & 1 << bit != 0;
        if has(SPEC_I_PT) {
            return Err(Sense::parameter_field(20, Some(SPEC_I_PT)));
        }
        // The other two mean nothing but in a registration.
        if let Action::Register { persists, .. } = &mut self.action {
            if has(ALL_TG_PT) {
                return Err(Sense::parameter_field(20, Some(ALL_TG_PT)));
            }
            if has(APTPL) && !context.lu.can_persist() {
                return Err(Sense::parameter_field(20, Some(APTPL)));
            }
            *persists = has(APTPL);
        }
        Ok(ReservationChange {
            nexus: context.nexus,
            action: self.action,
            keys: Keys {
                own: be64(0),
                action: be64(8),
            },
        })
    }

    fn answer(&self, outcome: Result<(), ReservationError>) -> Result<Next, Sense> {
        use AdditionalSense as Code;
        match outcome {
            Ok(()) => Ok(Next::Answer(DataIn::None)),
            Err(ReservationError::Conflict) => Ok(Next::Conflict),
            Err(ReservationError::InvalidRelease) => Err(Sense::illegal(Code::INVALID_RELEASE)),
            Err(ReservationError::ZeroKey) => Err(Sense::parameter_field(8, None)),
            Err(ReservationError::NoRoom) => {
                Err(Sense::illegal(Code::INSUFFICIENT_REGISTRATION_RESOURCES))
            }
            Err(ReservationError::NotSaved) => Err(match self.action {
                Action::Register { .. } => {
                    Sense::illegal(Code::INSUFFICIENT_REGISTRATION_RESOURCES)
                }
                Action::Reserve(_) | Action::Preempt { .. } => {
                    Sense::illegal(Code::INSUFFICIENT_RESERVATION_RESOURCES)
                }
                Action::Release(_) | Action::Clear => {
                    Sense::new(SenseKey::HardwareError, Code::INTERNAL_TARGET_FAILURE)
                }
            }),
        }
    }
}

impl Steps for ReserveOut {
    fn advance(&mut self, context: &mut Context<'_>, result: StepResult) -> Result<Next, Sense> {
        if let StepResult::Reservations(outcome) = result {
            return self.answer(outcome);
        }
        let change = self.parse(context)?;
        match context.lu.change_reservations(&change) {
            Some(outcome) => self.answer(outcome),
            None => Ok(Next::Block(BlockOp::ChangeReservations(change))),
        }
    }
}

/// PERSISTENT RESERVE IN.
pub(crate) fn plan_in<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let action = cdb.byte(1) & 0x1f;
    let data = planner.lu.with_reservations(|all| match action {
        0 => read_keys(all),
        1 => read_reservation(all),
        2 => report_capabilities(planner.lu.can_persist(), all.is_persistent()),
        _ => read_full_status(all),
    });
    Ok(Plan::data(data, cdb.be16(7).into()))
}

/// PRGENERATION and ADDITIONAL LENGTH in front of a list.
fn listed(all: &Reservations, list: Vec<u8>) -> Vec<u8> {
    let mut data = all.generation.to_be_bytes().to_vec();
    data.extend((list.len() as u32).to_be_bytes());
    data.extend(list);
    data
}

fn read_keys(all: &Reservations) -> Vec<u8> {
    let keys = all.registrants.iter().flat_map(|r| r.key.to_be_bytes());
    listed(all, keys.collect())
}

fn read_reservation(all: &Reservations) -> Vec<u8> {
    let mut list = Vec::new();
    if let Some(held) = &all.held {
        list.extend(all.held_key().to_be_bytes());
        list.extend([0, 0, 0, 0, 0, held.kind.into(), 0, 0]);
    }
    listed(all, list)
}

fn report_capabilities(can_persist: bool, persists: bool) -> Vec<u8> {
    // LENGTH; PTPL_C, and none of CRH, SIP_C, ATP_C; TMV and PTPL_A; every type of the mask.
    let (capable, activated) = (u8::from(can_persist), u8::from(persists));
    vec![0, 8, capable, 0x80 | activated, 0xea, 0x01, 0, 0]
}

fn read_full_status(all: &Reservations) -> Vec<u8> {
    let mut list = Vec::new();
    for registrant in &all.registrants {
        let holds = all.is_holder(&registrant.ports);
        let kind = all.held.as_ref().filter(|_| holds);
        list.extend(registrant.key.to_be_bytes());
        list.extend([0, 0, 0, 0, holds.into()]);
        list.push(kind.map_or(0, |held| held.kind.into()));
        list.extend([0; 4]);
        list.extend(registrant.ports.relative_id.to_be_bytes());
        let transport = transport_id(&registrant.ports.initiator);
        list.extend((transport.len() as u32).to_be_bytes());
        list.extend(transport);
    }
    listed(all, list)
}

/// The TransportID of an initiator port (SPC-4 7.6.4).
fn transport_id(port: &PortName) -> Vec<u8> {
    match port {
        PortName::Srp(id) => {
            let mut out = vec![0; 24];
            out[0] = port.protocol_identifier();
            out[8..].copy_from_slice(id);
            out
        }
        PortName::Iscsi(name) => {
            // With the session identifier: format 01b.
            let mut text = name.as_bytes().to_vec();
            text.push(0);
            text.resize(text.len().next_multiple_of(4).max(20), 0);
            let mut out = vec![0x40 | port.protocol_identifier(), 0];
            out.extend((text.len() as u16).to_be_bytes());
            out.extend(text);
            out
        }
    }
}
