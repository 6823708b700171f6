//! Request packets for a connected service: opcode, extended headers and payload.

use super::TxPacket;
use super::message::walk;
use super::send_queue::{Payload, SendWqe};
use crate::mr::{KeyError, MrTable};
use crate::verbs::{PdId, SendOp};
use crate::wire::{AtomicEth, HeaderBuf, Ieth, ImmDt, Opcode, Reth, push_header};

/// Maximum payload size to copy, in bytes. For small payloads, a copy is cheaper than passing a
/// reference and a separate segment to the kernel.
const COPIED: usize = 256;

/// Request packet and its position in the request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestPacket {
    /// Number of packet numbers used.
    pub(crate) count: u32,
    /// Offset in the message, in bytes.
    pub(crate) offset: u32,
    pub(crate) is_first: bool,
    pub(crate) is_last: bool,
}

/// Adds `len` bytes of request data, starting at `offset`, to `tx`.
pub(crate) fn gather(
    payload: Payload<'_>,
    pd: PdId,
    mrs: &MrTable,
    tx: &mut TxPacket,
    offset: usize,
    len: usize,
) -> Result<(), KeyError> {
    let sges = match payload {
        // The data was copied when the request was posted, so we don't need to check the key.
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

/// Returns the opcode for a request packet (IBTA 9.2.1, table 35).
pub(crate) fn plan_opcode(op: &SendOp, cut: RequestPacket) -> Opcode {
    // The operation determines the opcode group, and the packet position selects an opcode from
    // this group.
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
            unreachable!("local operations have no packets")
        }
    }
}

/// Appends the extended headers for a request packet (IBTA 9.2.1, table 38).
pub(crate) fn push_extended(headers: &mut HeaderBuf, wqe: &SendWqe, cut: RequestPacket, mtu: u32) {
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
            unreachable!("local operations have no packets")
        }
    }
}
