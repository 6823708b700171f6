//! Initiator requests with the values needed by most tests. If a test needs a different value, it
//! should set this field.

use riser_scsi::iscsi::pdu::{
    DataOut, NopIn, NopOut, ScsiCommand, Snack, SnackKind, TaskAttr, TextRequest, TmfFunction,
    TmfRequest,
};
use riser_scsi::iscsi::{CmdSn, Itt, StatSn, Ttt, text};

/// Creates a SIMPLE command for LUN 0 with a length of `len` bytes. The final bit is set, so no
/// unsolicited data will follow.
pub fn scsi_command(tag: u32, cmd_sn: u32, cdb: &[u8], writes: bool, len: u32) -> ScsiCommand {
    let mut whole = [0; 16];
    whole[..cdb.len()].copy_from_slice(cdb);
    ScsiCommand {
        immediate: false,
        is_final: true,
        reads: !writes && len > 0,
        writes,
        attribute: TaskAttr::Simple,
        lun: [0; 8],
        itt: Itt(tag),
        expected_length: len,
        cmd_sn: CmdSn(cmd_sn),
        exp_stat_sn: StatSn(0),
        cdb: whole.into_iter().collect(),
        bidi_read_length: None,
    }
}

/// Creates an immediate Text Request that queries all targets, and its text.
pub fn send_targets(cmd_sn: u32) -> (TextRequest, Vec<u8>) {
    let mut keys = Vec::new();
    text::put_pair(&mut keys, "SendTargets", "All");
    let request = TextRequest {
        immediate: true,
        is_final: true,
        continues: false,
        lun: [0; 8],
        itt: Itt(80),
        ttt: Ttt::NONE,
        cmd_sn: CmdSn(cmd_sn),
        exp_stat_sn: StatSn(0),
    };
    (request, keys)
}

/// Creates a Login Request, including its text, that moves directly to the full feature phase. The
/// text contains two names and additional keys, which must each be terminated with a null byte. The
/// next command must use number 1.
pub fn login(isid: [u8; 6], initiator: &str, target: &str, more: &str) -> Vec<u8> {
    let mut bhs = [0; 48];
    // Immediate, with a transition from operational negotiation to the full feature phase.
    (bhs[0], bhs[1]) = (0x43, 0x87);
    bhs[8..14].copy_from_slice(&isid);
    bhs[24..28].copy_from_slice(&1u32.to_be_bytes());
    let text =
        format!("InitiatorName={initiator}\0SessionType=Normal\0TargetName={target}\0{more}");
    let len = (text.len() as u32).to_be_bytes();
    bhs[5..8].copy_from_slice(&len[1..]);
    let mut pdu = [&bhs[..], text.as_bytes()].concat();
    pdu.resize(pdu.len().next_multiple_of(4), 0);
    pdu
}

/// Creates write data for LUN 0.
pub fn data_out(tag: u32, ttt: Ttt, sn: u32, offset: u32, is_final: bool) -> DataOut {
    DataOut {
        is_final,
        lun: [0; 8],
        itt: Itt(tag),
        ttt,
        exp_stat_sn: StatSn(0),
        data_sn: sn,
        offset,
    }
}

/// Creates an immediate task management request for LUN 0.
pub fn tmf_request(tag: u32, cmd_sn: u32, function: TmfFunction, referenced: u32) -> TmfRequest {
    TmfRequest {
        immediate: true,
        function,
        lun: [0; 8],
        itt: Itt(tag),
        referenced: Itt(referenced),
        cmd_sn: CmdSn(cmd_sn),
        exp_stat_sn: StatSn(0),
        ref_cmd_sn: CmdSn(0),
        exp_data_sn: 0,
    }
}

/// Creates a SNACK for LUN 0 without a target transfer tag.
pub fn snack(kind: SnackKind, tag: u32, begin: u32, run: u32) -> Snack {
    Snack {
        kind,
        lun: [0; 8],
        itt: Itt(tag),
        ttt: Ttt::NONE,
        exp_stat_sn: StatSn(0),
        begin,
        run,
    }
}

/// Creates an immediate ping.
pub fn nop_out(tag: u32, cmd_sn: u32) -> NopOut {
    NopOut {
        immediate: true,
        lun: [0; 8],
        itt: Itt(tag),
        ttt: Ttt::NONE,
        cmd_sn: CmdSn(cmd_sn),
        exp_stat_sn: StatSn(0),
    }
}

/// Creates the response to a ping sent by the target.
pub fn pong(ping: &NopIn, cmd_sn: u32) -> NopOut {
    NopOut {
        lun: ping.lun,
        ttt: ping.ttt,
        ..nop_out(Itt::NONE.0, cmd_sn)
    }
}

/// Creates a 10-byte CDB with an address and a number of blocks, such as READ (10).
pub fn cdb10(op: u8, lba: u32, blocks: u16) -> [u8; 10] {
    let [a, b, c, d] = lba.to_be_bytes();
    let [e, f] = blocks.to_be_bytes();
    [op, 0, a, b, c, d, 0, e, f, 0]
}

/// Creates the parameter list of PERSISTENT RESERVE OUT without APTPL.
pub fn reserve_out_list(own: u64, key: u64) -> [u8; 24] {
    let mut list = [0; 24];
    list[..8].copy_from_slice(&own.to_be_bytes());
    list[8..16].copy_from_slice(&key.to_be_bytes());
    list
}

/// Creates data that differs for each seed.
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ seed).collect()
}
