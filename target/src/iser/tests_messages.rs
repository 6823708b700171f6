//! Fuzz target for an active iSER connection. The input selects actions, such as messages of any
//! type, completions in order, time steps, and all ways to close the connection. There must not be
//! a panic, queues must be limited, and all resources must be released at the end.

use std::time::Duration;

use riser_scsi::iscsi::frame::{self, Digests};
use riser_scsi::iser::{Buffers, Header};

use super::{ConnState, IserParams};
use crate::iscsi::{Datamover as _, MAX_QUEUED};
use crate::tests::rig;
use crate::tests::rig::iser::{IserPeer, WINDOW, remote_buffer};

type Rig = rig::Rig<IserPeer>;

/// Small enough so that most commands are split.
const UNIT_WINDOW: u32 = 4096;

/// Number of buffers, which are used by commands with the same last bits of the tag.
const BUFFERS: u8 = 8;

fn connection() -> Rig {
    let params = IserParams {
        send_queue: 17,
        remote_invalidate: true,
        ..IserParams::new(WINDOW)
    };
    let mut rig = Rig::up_with(params, UNIT_WINDOW);
    (rig.prompt, rig.stalled, rig.checks_keys) = (false, true, false);
    for key in 0..BUFFERS.into() {
        rig.memory.insert(key, vec![0; 64 << 10]);
    }
    rig
}

/// Sends a message, cut to the length of a receive, if one is posted.
fn send(rig: &mut Rig, bytes: &[u8]) {
    if rig.receives() > 0 {
        let len = bytes.len().min(rig.receive_len());
        rig.send_bytes(&bytes[..len]);
    }
}

/// Sends a PDU, using the given bytes for the start and end of its header.
fn send_pdu(rig: &mut Rig, first: [u8; 2], rest: &[u8], data: &[u8]) {
    let mut bhs = [0; 48];
    bhs[..2].copy_from_slice(&first);
    let len = rest.len().min(40);
    bhs[8..8 + len].copy_from_slice(&rest[..len]);
    let key = u32::from(bhs[19] % BUFFERS);
    rig.advertise(key);
    let buffer = Some(remote_buffer(key));
    let header = Header::Control(Buffers {
        write: buffer,
        read: buffer,
    });
    let mut bytes = header.bytes().to_vec();
    frame::put_pdu(bhs, &[], data, Digests::default(), &mut bytes);
    send(rig, &bytes);
}

/// Executes an action of 12 bytes.
fn run_step(rig: &mut Rig, step: &[u8], cmd_sn: &mut u32) {
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
            *cmd_sn = cmd_sn.wrapping_add(1);
            let flags = if is_write { 0x20 } else { 0x40 } | at(2) & 0x80;
            let immediate = usize::from(at(3)).min(len as usize);
            let immediate = if is_write { immediate } else { 0 };
            send_pdu(rig, [0x01, flags], &head, &vec![1; immediate]);
        }
        // Unsolicited data.
        4 => {
            let mut head = [0; 40];
            head[11] = at(0) % 8;
            head[12..16].fill(0xff);
            head[31] = at(1);
            head[35] = at(2);
            send_pdu(rig, [0x05, at(3) & 0x80], &head, &[2; 200]);
        }
        // A task management request or NOP, using the next bytes of the input.
        5 => {
            let head = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, at(1)];
            send_pdu(rig, [0x42, 0x80 | (at(0) % 9)], &head, &[]);
        }
        6 => send_pdu(rig, [0x40, 0x80], &[0; 12], rest),
        // An arbitrary opcode.
        7 => send_pdu(rig, [at(0), at(1)], rest, rest),
        8 => send(rig, rest),
        9 => {
            if let Some(last) = rig.blocks().len().checked_sub(1) {
                rig.finish_block(last);
                rig.pump();
            }
        }
        10 => {
            rig.finish_chain(true);
            rig.pump();
        }
        _ => rig.advance(Duration::from_secs(u64::from(at(0) % 16))),
    }
}

#[test]
fn iser_messages() {
    bolero::check!(name = "iser_messages").for_each(|bytes: &[u8]| {
        let mut rig = connection();
        let mut cmd_sn = 1_u32;
        // Skip the login for some inputs, so that the target has to handle PDUs received before a
        // login.
        if bytes.first().is_some_and(|b| b & 3 != 0) {
            rig.login("InitialR2T=No\0");
            assert_eq!(rig.conn.state(), ConnState::FullFeature);
        }
        let bound = MAX_QUEUED + rig.conn.params().receives() as usize;
        for step in bytes.chunks(12) {
            if rig.in_error {
                break;
            }
            run_step(&mut rig, step, &mut cmd_sn);
            assert!(rig.conn.channel().mover().queued() <= bound);
        }
        if rig.in_error {
            rig.check_gone();
        } else {
            rig.close();
        }
    });
}
