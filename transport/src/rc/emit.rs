//! Request packets of a connected service: opcode, extended headers, payload.

use super::TxPacket;
use super::message::walk;
use super::send_queue::{Payload, SendWqe};
use crate::mr::{KeyError, MrTable};
use crate::verbs::{PdId, SendOp};
use crate::wire::{AtomicEth, HeaderBuf, Ieth, ImmDt, Opcode, Reth, push_header};

/// Longest payload that is copied, in bytes. To refer to memory, and to give it to the kernel as a
/// piece of its own, costs more than to copy so little.
const COPIED: usize = 256;

/// A request packet: its place among those of its request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    /// Packet numbers that it uses up.
    pub(crate) count: u32,
    /// Where it begins in the message, in bytes.
    pub(crate) offset: u32,
    pub(crate) is_first: bool,
    pub(crate) is_last: bool,
}

/// Puts `len` bytes of a request's data, from `offset` on, into `tx`.
pub(crate) fn gather(
    payload: Payload<'_>,
    pd: PdId,
    mrs: &MrTable,
    tx: &mut TxPacket,
    offset: usize,
    len: usize,
) -> Result<(), KeyError> {
    let sges = match payload {
        // Copied at the post, so neither key nor memory is looked at again.
        Payload::Inline(data) => {
            tx.inline.extend_from_slice(&data[offset..offset + len]);
            return Ok(());
        }
        Payload::Sges(sges) => sges,
    };
    walk(sges, offset, len, |sge, within, _, take| {
        let span = mrs.resolve_local_part(pd, sge, within..within + take, false)?;
        if len <= COPIED {
            span.append_to(within, take, &mut tx.inline);
        } else {
            span.push_slices(within, take, &mut tx.segments);
        }
        Ok(())
    })
}

/// The opcode of a request packet (IBTA 9.2.1, table 35).
pub(crate) fn plan_opcode(op: &SendOp, cut: Cut) -> Opcode {
    // The operation decides the family of opcodes, the place in the message picks one of it.
    let pick = |first, middle, last, only| match (cut.is_first, cut.is_last) {
        (true, false) => first,
        (false, false) => middle,
        (false, true) => last,
        (true, true) => only,
    };
    let send = |last, only| pick(Opcode::RcSendFirst, Opcode::RcSendMiddle, last, only);
    let write = |last, only| pick(Opcode::RcWriteFirst, Opcode::RcWriteMiddle, last, only);
    match op {
        SendOp::Send => send(Opcode::RcSendLast, Opcode::RcSendOnly),
        SendOp::SendImm(_) => send(Opcode::RcSendLastImm, Opcode::RcSendOnlyImm),
        SendOp::SendInv(_) => {
            let (last, only) = (Opcode::RcSendLastInvalidate, Opcode::RcSendOnlyInvalidate);
            send(last, only)
        }
        SendOp::Write(_) => write(Opcode::RcWriteLast, Opcode::RcWriteOnly),
        SendOp::WriteImm(..) => write(Opcode::RcWriteLastImm, Opcode::RcWriteOnlyImm),
        SendOp::Read(_) => Opcode::RcReadRequest,
        SendOp::CmpSwap { .. } => Opcode::RcCmpSwap,
        SendOp::FetchAdd { .. } => Opcode::RcFetchAdd,
        SendOp::RegMr { .. } | SendOp::BindMw(_) | SendOp::LocalInv(_) => {
            unreachable!("a request with packets")
        }
    }
}

/// Appends the extended headers of a request packet (IBTA 9.2.1, table 38).
pub(crate) fn push_extended(headers: &mut HeaderBuf, wqe: &SendWqe, cut: Cut, mtu: u32) {
    match wqe.op {
        SendOp::SendImm(imm) if cut.is_last => push_header(headers, &ImmDt::new(imm)),
        SendOp::SendInv(key) if cut.is_last => push_header(headers, &Ieth::new(key.0)),
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => {}
        SendOp::Write(to) | SendOp::WriteImm(to, _) => {
            if cut.is_first {
                push_header(headers, &Reth::new(to.addr, to.rkey.0, wqe.length));
            }
            if let (SendOp::WriteImm(_, imm), true) = (wqe.op, cut.is_last) {
                push_header(headers, &ImmDt::new(imm));
            }
        }
        SendOp::Read(from) => {
            let addr = from.addr.wrapping_add(u64::from(cut.offset));
            let len = (wqe.length - cut.offset).min(cut.count * mtu);
            push_header(headers, &Reth::new(addr, from.rkey.0, len));
        }
        SendOp::CmpSwap {
            remote,
            compare,
            swap,
        } => {
            let eth = AtomicEth::compare_swap(remote.addr, remote.rkey.0, compare, swap);
            push_header(headers, &eth);
        }
        SendOp::FetchAdd { remote, add } => {
            push_header(
                headers,
                &AtomicEth::fetch_add(remote.addr, remote.rkey.0, add),
            );
        }
        SendOp::RegMr { .. } | SendOp::BindMw(_) | SendOp::LocalInv(_) => {
            unreachable!("a request with packets")
        }
    }
}
