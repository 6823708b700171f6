//! PERSISTENT RESERVE IN and OUT (SPC-4 6.15, 6.16).
//!
//! A change to reservations does not wait for other commands. For PREEMPT AND ABORT, the commands
//! from preempted nexuses are aborted after the change has been made, and we send the response once
//! these commands have been removed.

use super::plan::{Context, Next, Plan, PlanResult, Planner, Steps};
use crate::cdb::Cdb;
use crate::data::cdb::persistent_reserve::{
    ALLOCATION_LENGTH, PARAMETER_LIST_LENGTH, SCOPE, SERVICE_ACTION, TYPE,
};
use crate::data::field::Field;
use crate::data::persistent_reserve::{
    capabilities, full_status, list, out, reservation, transport_id,
};
use crate::lu::BECOMING_READY;
use crate::nexus::PortName;
use crate::reservation::{
    Action, Keys, ReservationChange, ReservationError, ReservationType, Reservations,
};
use crate::sense::{AdditionalSense, Sense, SenseKey};
use crate::step::{BlockOp, DataIn, StepResult};

/// A PERSISTENT RESERVE OUT.
///
/// ```text
/// parameters received -> (response)
///                    \-> change saved -> preempted commands aborted -> (response)
/// ```
#[derive(Debug)]
pub(crate) struct ReserveOut {
    /// The service action. For a registration, APTPL is set when the parameters are received.
    action: Action,
}

/// Plans a PERSISTENT RESERVE OUT (SPC-4 6.16).
pub(crate) fn plan_out<M: From<ReserveOut>>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    // REGISTER and CLEAR ignore SCOPE and TYPE, and RELEASE checks them against the reservation
    // (SPC-4 6.16.2), so for these service actions we must not return a CDB error.
    let kind = ReservationType::try_from(cdb.get(TYPE)).ok();
    let is_unit = cdb.get(SCOPE) == 0;
    let scoped = || {
        if !is_unit {
            return Err(Sense::cdb_field(2, Some(SCOPE.highest_bit())));
        }
        kind.ok_or(Sense::cdb_field(2, Some(TYPE.highest_bit())))
    };
    let action = match cdb.get(SERVICE_ACTION) {
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
    let len = cdb.get(PARAMETER_LIST_LENGTH);
    // The parameter list has a fixed size because we don't support SPEC_I_PT.
    if len != out::LEN as u32 {
        return Err(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    planner.list(len, ReserveOut { action }.into())
}

impl ReserveOut {
    /// Returns the change that was requested in the parameters.
    fn parse(&mut self, context: &Context<'_>) -> Result<ReservationChange, Sense> {
        let mut list = [0; out::LEN];
        context.data.read(0, &mut list);
        let refused = |field: Field<bool>| {
            Sense::parameter_field(field.at() as u16, Some(field.highest_bit()))
        };
        let has = |field: Field<bool>| field.get(&list) == Some(true);
        // If we just ignored this bit, the initiator would assume that other initiators have been
        // registered.
        if has(out::SPEC_I_PT) {
            return Err(refused(out::SPEC_I_PT));
        }
        // The other two bits are only used for a registration.
        if let Action::Register { persists, .. } = &mut self.action {
            if has(out::ALL_TG_PT) {
                return Err(refused(out::ALL_TG_PT));
            }
            // If we just ignored this bit, a cluster would rely on a fence that is lost on restart.
            if has(out::APTPL) && !context.lu.can_persist() {
                return Err(refused(out::APTPL));
            }
            *persists = has(out::APTPL);
        }
        Ok(ReservationChange {
            nexus: context.nexus,
            action: self.action,
            keys: Keys {
                own: out::RESERVATION_KEY.get(&list).unwrap_or_default(),
                action: out::SERVICE_ACTION_KEY.get(&list).unwrap_or_default(),
            },
        })
    }

    fn respond_to_initiator(&self, outcome: Result<(), ReservationError>) -> Result<Next, Sense> {
        use AdditionalSense as Code;
        match outcome {
            Ok(()) => Ok(Next::Respond(DataIn::None)),
            Err(ReservationError::Conflict) => Ok(Next::Conflict),
            Err(ReservationError::InvalidRelease) => Err(Sense::illegal(Code::INVALID_RELEASE)),
            Err(ReservationError::ZeroKey) => {
                let at = out::SERVICE_ACTION_KEY.at() as u16;
                Err(Sense::parameter_field(at, None))
            }
            Err(ReservationError::NoRoom) => {
                Err(Sense::illegal(Code::INSUFFICIENT_REGISTRATION_RESOURCES))
            }
            Err(ReservationError::Retired) => Err(BECOMING_READY),
            // Use the sense code that matches the request. RELEASE and CLEAR don't need any new
            // resources, so for these it can only be a failure.
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
        // This is the second step. The target has made the change, because it needed to be saved or
        // to abort commands.
        if let StepResult::Reservations(outcome) = result {
            return self.respond_to_initiator(outcome);
        }
        // The parameters have only now been received, so we check the change when we make it
        // instead of when the command was planned.
        let change = self.parse(context)?;
        match context.lu.change_reservations(&change) {
            Some(outcome) => self.respond_to_initiator(outcome),
            None => Ok(Next::Block(BlockOp::ChangeReservations(change))),
        }
    }
}

/// Plans a PERSISTENT RESERVE IN (SPC-4 6.15).
pub(crate) fn plan_in<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let action = cdb.get(SERVICE_ACTION);
    // Use a single lock, because PRGENERATION and the list must be consistent.
    let data = planner.lu.with_reservations(|all| match action {
        0 => read_keys(all),
        1 => read_reservation(all),
        2 => report_capabilities(planner.lu.can_persist(), all.is_persistent()),
        _ => read_full_status(all),
    });
    Ok(Plan::data(data, cdb.get(ALLOCATION_LENGTH).into()))
}

/// Returns a list with a header.
fn listed(all: &Reservations, entries: Vec<u8>) -> Vec<u8> {
    let mut data = vec![0; list::LEN];
    list::PRGENERATION.set(&mut data, all.generation);
    list::ADDITIONAL_LENGTH.set(&mut data, entries.len() as u32);
    data.extend(entries);
    data
}

fn read_keys(all: &Reservations) -> Vec<u8> {
    let keys = all.registrants.iter().flat_map(|r| r.key.to_be_bytes());
    listed(all, keys.collect())
}

fn read_reservation(all: &Reservations) -> Vec<u8> {
    let descriptor = all.held.as_ref().map(|held| {
        let mut data = vec![0; reservation::LEN];
        reservation::RESERVATION_KEY.set(&mut data, all.held_key());
        reservation::TYPE.set(&mut data, held.kind.into());
        data
    });
    listed(all, descriptor.unwrap_or_default())
}

fn report_capabilities(can_persist: bool, persists: bool) -> Vec<u8> {
    use capabilities::{LEN, LENGTH, PTPL_A, PTPL_C, TMV, TYPE_MASK};
    /// Types 1, 3, 5, 6, 7 and 8.
    const ALL_TYPES: u16 = 0xea01;
    let mut data = vec![0; LEN];
    LENGTH.set(&mut data, LEN as u16);
    PTPL_C.set(&mut data, can_persist);
    PTPL_A.set(&mut data, persists);
    TMV.set(&mut data, true);
    TYPE_MASK.set(&mut data, ALL_TYPES);
    data
}

fn read_full_status(all: &Reservations) -> Vec<u8> {
    use full_status::{
        ADDITIONAL_LENGTH, LEN, R_HOLDER, RELATIVE_TARGET_PORT, RESERVATION_KEY, TYPE,
    };
    let mut entries = Vec::new();
    for registrant in &all.registrants {
        // TYPE is the type of the reservation, and only reported for a holder.
        let holds = all.is_holder(&registrant.ports);
        let kind = all
            .held
            .as_ref()
            .filter(|_| holds)
            .map(|held| held.kind.into());
        let transport = transport_id(&registrant.ports.initiator);
        let mut data = vec![0; LEN];
        RESERVATION_KEY.set(&mut data, registrant.key);
        R_HOLDER.set(&mut data, holds);
        TYPE.set(&mut data, kind.unwrap_or(0));
        RELATIVE_TARGET_PORT.set(&mut data, registrant.ports.relative_id);
        ADDITIONAL_LENGTH.set(&mut data, transport.len() as u32);
        entries.extend(data);
        entries.extend(transport);
    }
    listed(all, entries)
}

/// Returns the TransportID for an initiator port.
fn transport_id(port: &PortName) -> Vec<u8> {
    use transport_id::{
        ADDITIONAL_LENGTH, FORMAT_CODE, ISCSI_NAME_AT, LEN, PORT, PROTOCOL_IDENTIFIER, SRP_PORT_AT,
    };
    let mut data = vec![0; LEN];
    PROTOCOL_IDENTIFIER.set(&mut data, port.protocol_identifier());
    match port {
        PortName::Srp(id) => data[SRP_PORT_AT..].copy_from_slice(id),
        PortName::Iscsi(name) => {
            // Terminated and padded with zeros, up to a multiple of 4 bytes, and at least 20 bytes.
            let len = (name.len() + 1).next_multiple_of(4).max(20);
            data.resize(ISCSI_NAME_AT + len, 0);
            data[ISCSI_NAME_AT..][..name.len()].copy_from_slice(name.as_bytes());
            FORMAT_CODE.set(&mut data, PORT);
            ADDITIONAL_LENGTH.set(&mut data, len as u16);
        }
    }
    data
}
