//! Which worker a datagram belongs to.
//!
//! All workers of a device share one UDP port. A queue pair's number carries its worker in the low
//! bits, so the destination queue pair steers a packet. Queue pair 1 exists once for all of them:
//! there the connection manager says whose a message is ([`worker_of`]), by a communication id
//! whose low bits carry the worker as well. Other MADs belong to worker 0.
//!
//! Workers may also be processes that know nothing of each other's listeners ([`Requests::ToFirst`]).
//! Then messages that name no id of ours go to worker 0, which finds out whose they are.
//!
//! The same rule exists as a function ([`steer`]) and as a classic BPF program for
//! `SO_ATTACH_REUSEPORT_CBPF` ([`program`]); the tests run both over the same packets, and send
//! each CM message to sockets that share a port. Offsets count from the beginning of the UDP
//! payload.

use crate::cm::worker_of;
use crate::wire::cm_msg::{
    CmAttribute, FIRST_ID_OFFSET, MAD_ATTRIBUTE_OFFSET, MAD_CLASS_OFFSET, SECOND_ID_OFFSET,
    is_request,
};
use crate::wire::mad::MadClass;

/// BTH: the word with the destination queue pair in its low 24 bits.
const BTH_DEST: usize = 4;
/// A MAD, after BTH and DETH.
const MAD: usize = 12 + 8;

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let b = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_be_bytes(b.try_into().ok()?))
}

/// Where CM messages go that name no id of the receiver's: requests, and refusals by peers that have
/// had no answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Requests {
    /// To the workers in turn, by the id of the sender: each worker listens for all.
    #[default]
    Spread,
    /// To worker 0.
    ToFirst,
}

/// The worker that a datagram belongs to, of `1 << worker_bits`; `None` if it is too short to say.
#[must_use]
pub fn steer(datagram: &[u8], worker_bits: u8, requests: Requests) -> Option<u32> {
    let qpn = word(datagram, BTH_DEST)? & 0x00ff_ffff;
    // Queue pair 1 is every worker's, so its number says nothing.
    if qpn != 1 {
        return Some(qpn & ((1 << worker_bits) - 1));
    }
    let mad = datagram.get(MAD..)?;
    // Only CM messages carry ids. The rest, such as queries of the I/O unit, is worker 0's.
    if *mad.get(MAD_CLASS_OFFSET)? != MadClass::ComMgt as u8 {
        return Some(0);
    }
    let worker = worker_of(mad, worker_bits.into())?;
    match requests {
        Requests::ToFirst if is_request(mad) => Some(0),
        _ => Some(worker),
    }
}

/// One instruction of classic BPF: code, jump if true, jump if false, operand.
pub type Instruction = (u16, u8, u8, u32);

const LD_W_ABS: u16 = 0x20;
const LD_H_ABS: u16 = 0x28;
const LD_B_ABS: u16 = 0x30;
const AND_K: u16 = 0x54;
const JEQ_K: u16 = 0x15;
const RET_A: u16 = 0x16;
const RET_K: u16 = 0x06;

/// The same rule as a program. A load beyond the packet ends it with 0, that is worker 0.
#[must_use]
pub fn program(worker_bits: u8, requests: Requests) -> [Instruction; 18] {
    /// Where the first id is loaded, and where the answer is worker 0.
    const FIRST_ID: u8 = 14;
    const ZERO: u8 = 17;
    let mask = (1u32 << worker_bits) - 1;
    let request = match requests {
        Requests::Spread => FIRST_ID,
        Requests::ToFirst => ZERO,
    };
    // Jumps count from the next instruction.
    let if_attribute = |at: u8, attribute: CmAttribute, to: u8| {
        (JEQ_K, to - at - 1, 0, u32::from(attribute as u16))
    };
    [
        (LD_W_ABS, 0, 0, BTH_DEST as u32),
        (AND_K, 0, 0, 0x00ff_ffff),
        (JEQ_K, 2, 0, 1),
        (AND_K, 0, 0, mask),
        (RET_A, 0, 0, 0),
        (LD_B_ABS, 0, 0, (MAD + MAD_CLASS_OFFSET) as u32),
        (JEQ_K, 1, 0, MadClass::ComMgt as u32),
        (RET_K, 0, 0, 0),
        (LD_H_ABS, 0, 0, (MAD + MAD_ATTRIBUTE_OFFSET) as u32),
        if_attribute(9, CmAttribute::SidrRep, FIRST_ID),
        if_attribute(10, CmAttribute::Req, request),
        if_attribute(11, CmAttribute::SidrReq, request),
        (LD_W_ABS, 0, 0, (MAD + SECOND_ID_OFFSET) as u32),
        // An id of zero: the sender does not know ours.
        (JEQ_K, request - 14, 1, 0),
        (LD_W_ABS, 0, 0, (MAD + FIRST_ID_OFFSET) as u32),
        (AND_K, 0, 0, mask),
        (RET_A, 0, 0, 0),
        (RET_K, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Requests::{Spread, ToFirst};
    use super::*;

    /// Runs a program as the kernel does; `None` for a load beyond the packet.
    fn run(program: &[Instruction], packet: &[u8]) -> Option<u32> {
        let (mut a, mut pc) = (0u32, 0usize);
        loop {
            let (code, jt, jf, k) = program[pc];
            pc += 1;
            let load = |n: usize| {
                let b = packet.get(k as usize..k as usize + n)?;
                Some(b.iter().fold(0u32, |v, &x| v << 8 | u32::from(x)))
            };
            match code {
                LD_W_ABS => a = load(4)?,
                LD_H_ABS => a = load(2)?,
                LD_B_ABS => a = load(1)?,
                AND_K => a &= k,
                JEQ_K => pc += usize::from(if a == k { jt } else { jf }),
                RET_A => return Some(a),
                RET_K => return Some(k),
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    fn mad(attribute: u16, local: u32, remote: u32) -> Vec<u8> {
        let mut p = vec![0u8; 12 + 8 + 256 + 4];
        p[0] = 0x64;
        p[7] = 1;
        p[20] = 1;
        p[21] = 7;
        p[36..38].copy_from_slice(&attribute.to_be_bytes());
        p[44..48].copy_from_slice(&local.to_be_bytes());
        p[48..52].copy_from_slice(&remote.to_be_bytes());
        p
    }

    #[test]
    fn requests_go_by_the_peers_id_and_answers_by_ours() {
        assert_eq!(steer(&mad(0x10, 0x1235, 0), 2, Spread), Some(1));
        assert_eq!(steer(&mad(0x10, 0x1235, 2), 2, Spread), Some(1));
        assert_eq!(steer(&mad(0x13, 0x1235, 0x7777_0002), 2, Spread), Some(2));
        assert_eq!(steer(&mad(0x15, 0x1235, 0x7777_0003), 2, Spread), Some(3));
        let mut other_class = mad(0x13, 1, 3);
        other_class[21] = 6;
        assert_eq!(steer(&other_class, 2, Spread), Some(0));
        let mut data = vec![0; 16];
        data[5..8].copy_from_slice(&[0x12, 0x34, 0x57]);
        assert_eq!(steer(&data, 3, Spread), Some(7));
        assert_eq!(steer(&data, 0, Spread), Some(0));
        assert_eq!(steer(&data[..7], 3, Spread), None);
    }

    /// Every CM message with every combination of known and unknown ids, as a datagram.
    fn cm_datagrams() -> Vec<Vec<u8>> {
        let ids = [0, 0x1235, 0x7777_0002, 0xffff_ffff];
        let mut datagrams = Vec::new();
        for attribute in 0x10..=0x1a {
            for first in ids {
                datagrams.extend(ids.map(|second| mad(attribute, first, second)));
            }
        }
        datagrams
    }

    #[test]
    fn the_program_the_function_and_the_connection_manager_agree_on_every_message() {
        for datagram in cm_datagrams() {
            let worker = worker_of(&datagram[MAD..][..256], 2);
            assert_eq!(
                steer(&datagram, 2, Spread),
                worker,
                "{:02x?}",
                &datagram[36..52]
            );
            assert_eq!(run(&program(2, Spread), &datagram), worker);
        }
        // Withdrawn by a peer without an answer; asked for a datagram service, and answered.
        assert_eq!(steer(&mad(0x12, 0x1237, 0), 2, Spread), Some(3));
        assert_eq!(steer(&mad(0x12, 0x1237, 0x7777_0002), 2, Spread), Some(2));
        assert_eq!(steer(&mad(0x17, 0x1237, 0xffff_0000), 2, Spread), Some(3));
        assert_eq!(steer(&mad(0x18, 0x1237, 0x0000_0002), 2, Spread), Some(3));
    }

    #[test]
    fn requests_go_to_the_first_worker_where_the_others_may_not_know_them() {
        let (request, answer) = (0x1235, 0x7777_0002);
        for (attribute, second, to) in [
            (0x10, 0, 0),      // REQ
            (0x10, answer, 0), // REQ, where a reserved field is not zero
            (0x12, 0, 0),      // REJ of a REQ without an answer
            (0x12, answer, 2), // REJ of a REP
            (0x13, answer, 2), // REP
            (0x17, 0, 0),      // SIDR_REQ
            (0x18, answer, 1), // SIDR_REP, by the id of the question
        ] {
            let datagram = mad(attribute, request, second);
            assert_eq!(steer(&datagram, 2, ToFirst), Some(to), "{attribute:#x}");
            assert_eq!(run(&program(2, ToFirst), &datagram), Some(to));
        }
    }

    #[test]
    fn sockets_that_share_a_port_get_what_their_workers_must() {
        use std::net::UdpSocket;
        use std::time::Duration;

        use socket2::{Domain, Socket, Type};

        let mut port = 0;
        let sockets: Vec<UdpSocket> = (0..4)
            .map(|_| {
                let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
                socket.set_reuse_port(true).unwrap();
                let addr = std::net::SocketAddr::from(([127, 0, 0, 1], port));
                socket.bind(&addr.into()).unwrap();
                crate::roce::sys::attach_selector(&socket, 2, Spread).unwrap();
                let socket = UdpSocket::from(socket);
                port = socket.local_addr().unwrap().port();
                socket
                    .set_read_timeout(Some(Duration::from_secs(10)))
                    .unwrap();
                socket
            })
            .collect();
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        for datagram in cm_datagrams() {
            peer.send_to(&datagram, ("127.0.0.1", port)).unwrap();
            let worker = steer(&datagram, 2, Spread).unwrap() as usize;
            let mut got = [0; 512];
            let len = sockets[worker].recv(&mut got).unwrap();
            assert_eq!(got[..len], datagram);
        }
    }

    proptest! {
        #[test]
        fn program_and_function_agree(
            mut packet in proptest::collection::vec(any::<u8>(), 0..80),
            gsi: bool, cm: bool, attribute in 0u8..0x20, bits in 0u8..6, to_first: bool,
        ) {
            if gsi && packet.len() > 8 {
                packet[5..8].copy_from_slice(&[0, 0, 1]);
            }
            if cm && packet.len() > 22 {
                packet[21] = 7;
            }
            if attribute >= 0x10 && packet.len() > 40 {
                packet[36..38].copy_from_slice(&[0, attribute]);
            }
            let requests = if to_first { ToFirst } else { Spread };
            let program = program(bits, requests);
            // What is too short is worker 0's, and so is what goes there before it is too short.
            let or_first = |to: Option<u32>| if to_first { to.or(Some(0)) } else { to };
            prop_assert_eq!(
                or_first(run(&program, &packet)),
                or_first(steer(&packet, bits, requests))
            );
        }
    }
}
