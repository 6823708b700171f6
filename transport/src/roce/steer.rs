//! Which worker a datagram belongs to.
//!
//! All workers of a device share one UDP port. A queue pair's number carries its worker in the low
//! bits, so the destination queue pair steers a packet. Queue pair 1 exists once for all of them:
//! there a connection request goes by the sender's communication id, which spreads requests and
//! brings a repeated one to the same worker, and every other CM message by the id of ours that it
//! names, which carries the worker in its low bits as well. Other MADs belong to worker 0.
//!
//! The same rule exists twice, as a function ([`steer`]) and as a classic BPF program for
//! `SO_ATTACH_REUSEPORT_CBPF` ([`program`]); the tests run both over the same packets. Offsets count
//! from the beginning of the UDP payload.

/// BTH: the word with the destination queue pair in its low 24 bits.
const BTH_DEST: usize = 4;
/// Management class of a MAD, after BTH and DETH.
const MAD_CLASS: usize = 12 + 8 + 1;
/// Attribute id of a MAD.
const MAD_ATTRIBUTE: usize = 12 + 8 + 16;
/// Sender's communication id in every CM message.
const LOCAL_COMM_ID: usize = 12 + 8 + 24;
/// Receiver's communication id in every CM message but a request.
const REMOTE_COMM_ID: usize = LOCAL_COMM_ID + 4;

const CLASS_CM: u8 = 0x07;
const ATTRIBUTE_REQ: u16 = 0x0010;

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let b = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_be_bytes(b.try_into().ok()?))
}

/// The worker that a datagram belongs to, of `1 << worker_bits`; `None` if it is too short to say.
#[must_use]
pub fn steer(datagram: &[u8], worker_bits: u8) -> Option<u32> {
    let mask = (1u32 << worker_bits) - 1;
    let qpn = word(datagram, BTH_DEST)? & 0x00ff_ffff;
    if qpn != 1 {
        return Some(qpn & mask);
    }
    if *datagram.get(MAD_CLASS)? != CLASS_CM {
        return Some(0);
    }
    let attribute = word(datagram, MAD_ATTRIBUTE)? >> 16;
    let at = if attribute == u32::from(ATTRIBUTE_REQ) {
        LOCAL_COMM_ID
    } else {
        REMOTE_COMM_ID
    };
    Some(word(datagram, at)? & mask)
}

/// One instruction of classic BPF: code, jump if true, jump if false, operand.
pub type Instruction = (u16, u8, u8, u32);

const LD_W_ABS: u16 = 0x20;
const LD_H_ABS: u16 = 0x28;
const LD_B_ABS: u16 = 0x30;
const AND_K: u16 = 0x54;
const JEQ_K: u16 = 0x15;
const JA: u16 = 0x05;
const RET_A: u16 = 0x16;
const RET_K: u16 = 0x06;

/// The same rule as a program. A load beyond the packet ends it with 0, that is worker 0.
#[must_use]
pub fn program(worker_bits: u8) -> [Instruction; 15] {
    let mask = (1u32 << worker_bits) - 1;
    [
        (LD_W_ABS, 0, 0, BTH_DEST as u32),
        (AND_K, 0, 0, 0x00ff_ffff),
        (JEQ_K, 2, 0, 1),
        (AND_K, 0, 0, mask),
        (RET_A, 0, 0, 0),
        (LD_B_ABS, 0, 0, MAD_CLASS as u32),
        (JEQ_K, 1, 0, u32::from(CLASS_CM)),
        (RET_K, 0, 0, 0),
        (LD_H_ABS, 0, 0, MAD_ATTRIBUTE as u32),
        (JEQ_K, 2, 0, u32::from(ATTRIBUTE_REQ)),
        (LD_W_ABS, 0, 0, REMOTE_COMM_ID as u32),
        (JA, 0, 0, 1),
        (LD_W_ABS, 0, 0, LOCAL_COMM_ID as u32),
        (AND_K, 0, 0, mask),
        (RET_A, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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
                JA => pc += k as usize,
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
        assert_eq!(steer(&mad(0x10, 0x1235, 0), 2), Some(1));
        assert_eq!(steer(&mad(0x13, 0x1235, 0x7777_0002), 2), Some(2));
        assert_eq!(steer(&mad(0x15, 0x1235, 0x7777_0003), 2), Some(3));
        let mut other_class = mad(0x13, 1, 3);
        other_class[21] = 6;
        assert_eq!(steer(&other_class, 2), Some(0));
        let mut data = vec![0; 16];
        data[5..8].copy_from_slice(&[0x12, 0x34, 0x57]);
        assert_eq!(steer(&data, 3), Some(7));
        assert_eq!(steer(&data, 0), Some(0));
        assert_eq!(steer(&data[..7], 3), None);
    }

    proptest! {
        #[test]
        fn program_and_function_agree(
            mut packet in proptest::collection::vec(any::<u8>(), 0..80),
            gsi: bool, cm: bool, req: bool, bits in 0u8..6,
        ) {
            if gsi && packet.len() > 8 {
                packet[5..8].copy_from_slice(&[0, 0, 1]);
            }
            if cm && packet.len() > 22 {
                packet[21] = 7;
            }
            if req && packet.len() > 40 {
                packet[36..38].copy_from_slice(&[0, 0x10]);
            }
            prop_assert_eq!(run(&program(bits), &packet), steer(&packet, bits));
        }
    }
}
