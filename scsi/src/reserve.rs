//! PERSISTENT RESERVE IN and OUT (SPC-4 6.15, 6.16), RESERVE and RELEASE (SPC-2 7.21 to 7.23, 7.16
//! to 7.18).
//!
//! What changes reservations runs alone on its unit (see [`task`](crate::task)). So PREEMPT AND
//! ABORT finds no command of a preempted nexus that runs: those that were there have ended, those
//! that come later conflict.

use crate::access::copy_out;
use crate::cdb::Cdb;
use crate::nexus::PortName;
use crate::plan::{Context, Machine, Next, Plan, PlanResult, Planner, Refusal, Transfer};
use crate::reservation::{Keys, Kind, Refused, Reservations};
use crate::sense::{AdditionalSense, Sense};
use crate::step::DataIn;

/// Length of the parameter list of PERSISTENT RESERVE OUT.
const LIST: u32 = 24;

/// A PERSISTENT RESERVE OUT that waits for its parameters.
#[derive(Debug)]
pub(crate) struct ReserveOut {
    action: Action,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Register { ignore: bool },
    Reserve(Kind),
    Release(Option<Kind>),
    Clear,
    Preempt(Kind),
}

/// PERSISTENT RESERVE OUT.
pub(crate) fn plan_reserve_out(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    let kind = Kind::of(cdb.byte(2) & 0x0f);
    let is_unit = cdb.byte(2) >> 4 == 0;
    let scoped = || {
        if !is_unit {
            return Err(Sense::cdb_field(2, Some(7)));
        }
        kind.ok_or(Sense::cdb_field(2, Some(3)))
    };
    let action = match cdb.byte(1) & 0x1f {
        0 => Action::Register { ignore: false },
        1 => Action::Reserve(scoped()?),
        2 => Action::Release(kind.filter(|_| is_unit)),
        3 => Action::Clear,
        4 | 5 => Action::Preempt(scoped()?),
        _ => Action::Register { ignore: true },
    };
    let len = cdb.be32(5);
    if len != LIST {
        return Err(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    if planner.request.expected.data_out < len {
        return Err(Planner::short_data_out(len));
    }
    Ok(Plan {
        transfer: Transfer {
            data_in: 0,
            data_out: len,
        },
        buffer_len: len,
        first: Next::Receive(len),
        machine: Machine::ReserveOut(ReserveOut { action }),
    })
}

impl ReserveOut {
    pub(crate) fn advance(&mut self, context: &mut Context<'_>) -> Result<Next, Sense> {
        let mut list = [0; LIST as usize];
        copy_out(context.data, 0, &mut list);
        let be64 = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&list[at..at + 8]);
            u64::from_be_bytes(bytes)
        };
        // SPEC_I_PT, ALL_TG_PT and APTPL: what REPORT CAPABILITIES says that we cannot.
        for bit in [3_u8, 2, 0] {
            if list[20] & 1 << bit != 0 {
                return Err(Sense::parameter_field(20, Some(bit)));
            }
        }
        let keys = Keys {
            own: be64(0),
            action: be64(8),
        };
        let Some(nexus) = context.lu.nexus(context.nexus) else {
            return Ok(Next::Conflict);
        };
        let action = self.action;
        let change = |all: &mut Reservations| match action {
            Action::Register { ignore } => all.register(&nexus, keys, ignore),
            Action::Reserve(kind) => all.reserve(&nexus, keys, kind),
            Action::Release(kind) => all.release(&nexus, keys, kind),
            Action::Clear => all.clear(&nexus, keys),
            Action::Preempt(kind) => all.preempt(&nexus, keys, kind),
        };
        match context.lu.change_reservations(change) {
            Ok(()) => Ok(Next::Answer(DataIn::None)),
            Err(Refused::Conflict) => Ok(Next::Conflict),
            Err(Refused::InvalidRelease) => Err(Sense::illegal(AdditionalSense::INVALID_RELEASE)),
            Err(Refused::ZeroKey) => Err(Sense::parameter_field(8, None)),
            Err(Refused::NoRoom) => Err(Sense::illegal(
                AdditionalSense::INSUFFICIENT_REGISTRATION_RESOURCES,
            )),
        }
    }
}

/// PERSISTENT RESERVE IN.
pub(crate) fn plan_reserve_in(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    let action = cdb.byte(1) & 0x1f;
    let data = planner.lu.with_reservations(|all| match action {
        0 => read_keys(all),
        1 => read_reservation(all),
        2 => report_capabilities(),
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
        list.extend([0, 0, 0, 0, 0, held.kind as u8, 0, 0]);
    }
    listed(all, list)
}

fn report_capabilities() -> Vec<u8> {
    // LENGTH; none of CRH, SIP_C, ATP_C, PTPL_C; TMV; every type of the mask.
    vec![0, 8, 0, 0x80, 0xea, 0x01, 0, 0]
}

fn read_full_status(all: &Reservations) -> Vec<u8> {
    let mut list = Vec::new();
    for registrant in &all.registrants {
        let holds = all.is_holder(&registrant.ports);
        let kind = all.held.as_ref().filter(|_| holds);
        list.extend(registrant.key.to_be_bytes());
        list.extend([0, 0, 0, 0, holds.into()]);
        list.push(kind.map_or(0, |held| held.kind as u8));
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

/// RESERVE (6) and (10).
pub(crate) fn plan_reserve(planner: &Planner<'_>, _cdb: &Cdb) -> PlanResult {
    let id = planner.request.nexus;
    if planner.lu.reserve_unit(id) {
        Ok(Plan::good())
    } else {
        Err(Refusal::conflict())
    }
}

/// RELEASE (6) and (10).
pub(crate) fn plan_release(planner: &Planner<'_>, _cdb: &Cdb) -> PlanResult {
    planner.lu.release_unit(planner.request.nexus);
    Ok(Plan::good())
}
