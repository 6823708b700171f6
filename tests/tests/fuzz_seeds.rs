//! Creates the seeds for the decoder fuzz targets: messages sent between two Linux kernels in the
//! captures in `tests/data`, and some created here if they are not in a capture. Set
//! `RISER_WRITE_SEEDS=1` to write the files.

use std::collections::BTreeMap;

use riser_exports::nbd::proto::{self, Cookie, Errno, flag, info, opt, rep};
use riser_scsi::iscsi::frame::{Digests, Framer};
use riser_scsi::iscsi::pdu::{
    DataOut, FromInitiator as FromIscsiInitiator, FromTarget as FromIscsiTarget, LogoutReason,
    LogoutRequest, NopOut, TextRequest, TmfFunction, TmfRequest,
};
use riser_scsi::iscsi::{Cid, CmdSn, Itt, StatSn, Ttt};
use riser_scsi::iser::{Buffers, CmHeader, Message, put_control};
use riser_scsi::srp::{
    BufferFormats, Cmd, CredReq, DataBuffer, FromInitiator, FromTarget, ImmediateDataOffset,
    IndirectTable, InitiatorPortId, LoginRej, LoginRejReason, LoginReq, LoginReqFlags, MemDesc,
    MultiChannelAction, Tag, TargetPortId, TaskAttr, TskMgmt, TskMgmtFunction,
};
use riser_tests::capture::packets;
use riser_tests::seeds;
use riser_transport::wire::cm_msg::CmMessage;
use riser_transport::wire::cma::CmaHeader;
use riser_transport::wire::dm::{Attribute, DmHeader, Method, Status};
use riser_transport::wire::packet::Packet;

const CAPTURES: [(&str, &[u8]); 3] = [
    ("srp", include_bytes!("../data/golden_srp.pcap")),
    ("iser", include_bytes!("../data/golden_iser.pcap")),
    ("rej", include_bytes!("../data/rej.pcap")),
];

/// Seeds by target and name.
#[derive(Default)]
struct Seeds(BTreeMap<&'static str, BTreeMap<String, Vec<u8>>>);

impl Seeds {
    /// Adds a seed, unless there already is one of the same kind that is not longer.
    fn add(&mut self, target: &'static str, kind: impl Into<String>, bytes: &[u8]) {
        let of_target = self.0.entry(target).or_default();
        let seed = of_target
            .entry(format!("seed-{}", kind.into()))
            .or_insert_with(|| bytes.to_vec());
        if bytes.len() < seed.len() {
            *seed = bytes.to_vec();
        }
    }
}

fn of_captures() -> Seeds {
    let mut seeds = Seeds::default();
    for (name, capture) in CAPTURES {
        // Messages with several packets, by destination.
        let mut partial = BTreeMap::<_, Vec<u8>>::new();
        for datagram in packets(capture).map(|packet| packet.datagram) {
            let opcode = datagram[0];
            seeds.add("packet", format!("{opcode:02x}"), datagram);
            let packet = Packet::parse(datagram).unwrap();
            match opcode {
                // A datagram for queue pair 1.
                0x64 => mad(&mut seeds, name, packet.payload),
                0x00 => drop(partial.insert(datagram[5..8].to_vec(), packet.payload.to_vec())),
                0x01 | 0x02 | 0x04 | 0x16 | 0x17 => {
                    let mut message = match opcode {
                        0x04 | 0x17 => Vec::new(),
                        _ => partial.remove(&datagram[5..8]).unwrap(),
                    };
                    message.extend_from_slice(packet.payload);
                    match name {
                        _ if opcode == 0x01 => {
                            partial.insert(datagram[5..8].to_vec(), message);
                        }
                        "srp" => srp(&mut seeds, &message),
                        _ => iser(&mut seeds, &message),
                    }
                }
                _ => {}
            }
        }
    }
    words(&mut seeds);
    logins(&mut seeds);
    information_units(&mut seeds);
    pdus(&mut seeds);
    nbd(&mut seeds);
    nbd_negotiations(&mut seeds);
    nbd_replies(&mut seeds);
    device_management(&mut seeds);
    for (kind, data) in PARAMETER_DATA {
        seeds.add("parameter_data", kind, data);
    }
    seeds
}

/// Data returned by a target, with the name of the command.
const PARAMETER_DATA: [(&str, &[u8]); 12] = [
    (
        "inquiry",
        b"\0\0\x06\x12\x1f\0\0\x02LIO-ORG disk            4.0 ",
    ),
    ("page-00", b"\0\0\0\x05\0\x80\x83\xb0\xb2"),
    ("page-80", b"\0\x80\0\x04abcd"),
    // NAA 6h, a T10 vendor identification, a relative target port and a SCSI name string.
    (
        "page-83",
        b"\0\x83\0\x3c\x01\x03\0\x10\x60\x01\x40\x51\x23\x45\x67\x89\xab\xcd\xef\x01\x23\x45\x67\x89\
          \x02\x01\0\x0cLIO-ORG disk\x51\x94\0\x04\0\0\0\x01\x53\x98\0\x0ciqn.2026-1.a",
    ),
    (
        "page-b0",
        b"\0\xb0\0\x3c\0\x01\0\0\0\0\x20\0\0\0\x10\0\0\0\0\0\0\x01\0\0\0\0\0\x01\0\0\0\x08\x80\0\0\0\0\0\0\0\0\
          \0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
    ),
    ("page-b2", b"\0\xb2\0\x04\0\xe4\x02\0"),
    (
        "capacity",
        b"\0\0\0\0\0\0\x1f\xff\0\0\x02\0\0\x03\xc0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
    ),
    (
        "luns",
        b"\0\0\0\x10\0\0\0\0\0\0\0\0\0\0\0\0\0\x03\0\0\0\0\0\0",
    ),
    (
        "lba-status",
        b"\0\0\0\x14\0\0\0\0\0\0\0\0\0\0\0\x08\0\0\0\x10\x01\0\0\0",
    ),
    (
        "mode-6",
        b"\x17\0\x90\0\x08\x12\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
    ),
    (
        "sense-fixed",
        b"\xf0\0\x03\0\0\x12\x34\x0a\0\0\0\0\x11\0\0\0\0\0",
    ),
    (
        "sense-descriptors",
        b"\x72\x03\x11\0\0\0\0\x14\0\x0a\x80\0\0\0\0\0\0\0\x12\x34\x02\x06\0\0\x80\0\x2a\0",
    ),
];

/// Adds NBD client sessions: flags, an option, and then a request.
fn nbd(seeds: &mut Seeds) {
    const GO: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x0a\0\0\0\x04disk\0\0";
    const LIST: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x03\0\0\0\0IHAVEOPT\0\0\0\x02\0\0\0\0";
    const OLD: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x04disk";
    let request = |kind: u8, len: u16| -> Vec<u8> {
        let [high, low] = len.to_be_bytes();
        // Cookie, offset, and the first half of the length. A flush is always for the whole disk.
        let at = match kind {
            3 => b"COOKIE!!\0\0\0\0\0\0\0\0\0\0",
            _ => b"COOKIE!!\0\0\0\0\0\0\x10\0\0\0",
        };
        [&b"\x25\x60\x95\x13\0\0\0"[..], &[kind], at, &[high, low]].concat()
    };
    seeds.add("nbd_stream", "read", &[GO, &request(0, 512)].concat());
    let write = [GO, &request(1, 512), &[7; 512]].concat();
    seeds.add("nbd_stream", "write", &write);
    for (kind, code) in [("flush", 3), ("trim", 4), ("zeroes", 6)] {
        let len = if code == 3 { 0 } else { 4096 };
        seeds.add("nbd_stream", kind, &[GO, &request(code, len)].concat());
    }
    seeds.add("nbd_stream", "old-style", &[OLD, &request(0, 512)].concat());
    seeds.add("nbd_stream", "list", LIST);
}

/// Adds data sent by NBD servers to our client before the transmission phase.
fn nbd_negotiations(seeds: &mut Seeds) {
    let greeting = b"NBDMAGICIHAVEOPT\0\x03";
    let reply = |option: u32, kind: u32, data: &[u8]| {
        let mut out = proto::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
        for number in [option, kind, data.len() as u32] {
            out.extend(number.to_be_bytes());
        }
        out.extend(data);
        out
    };
    let flags = flag::HAS_FLAGS | flag::SEND_FLUSH;
    let mut export = info::EXPORT.to_be_bytes().to_vec();
    export.extend((1u64 << 20).to_be_bytes());
    export.extend(flags.to_be_bytes());
    let mut sizes = info::BLOCK_SIZE.to_be_bytes().to_vec();
    for size in [512u32, 4096, 1 << 20] {
        sizes.extend(size.to_be_bytes());
    }
    let parts = [
        reply(opt::STRUCTURED_REPLY, rep::ACK, &[]),
        reply(
            opt::SET_META_CONTEXT,
            rep::META_CONTEXT,
            b"\0\0\0\x01base:allocation",
        ),
        reply(opt::SET_META_CONTEXT, rep::ACK, &[]),
        reply(opt::GO, rep::INFO, &export),
        reply(opt::GO, rep::INFO, &sizes),
        reply(opt::GO, rep::ACK, &[]),
    ];
    let whole = [&greeting[..], &parts.concat()].concat();
    seeds.add("nbd_negotiation", "structured", &whole);
    let older = [
        reply(opt::STRUCTURED_REPLY, rep::ERR_UNSUP, &[]),
        reply(opt::GO, rep::ERR_UNSUP, &[]),
        export[2..].to_vec(),
    ];
    let older = [&greeting[..], &older.concat()].concat();
    seeds.add("nbd_negotiation", "export-name", &older);
}

/// Adds replies from NBD servers to the requests that `fuzz_nbd_client.rs` has in flight. The first
/// byte selects whether structured replies are used.
fn nbd_replies(seeds: &mut Seeds) {
    // The number of the request, and its index.
    let cookie = |n: u64| Cookie((n + 1) << 32 | n);
    let (read, write, flush, status) = (cookie(0), cookie(1), cookie(2), cookie(3));
    let simple = [
        &[0_u8][..],
        &proto::simple_reply(flush, None),
        &proto::simple_reply(write, Some(Errno::NoSpc)),
        &proto::simple_reply(read, None),
        &[7; 64],
    ];
    seeds.add("nbd_replies", "simple", &simple.concat());
    let chunks = [
        &[1_u8][..],
        &proto::chunk_header(read, proto::chunk::OFFSET_HOLE, 0, 12),
        &4096u64.to_be_bytes(),
        &32u32.to_be_bytes(),
        &proto::data_chunk(read, 4128, 32, false),
        &[7; 32],
        &proto::done_chunk(read),
    ];
    seeds.add("nbd_replies", "chunks", &chunks.concat());
    let extents = [(65536, 0), (65536, 3)];
    let extents = [&[1_u8][..], &proto::status_chunk(status, &extents)];
    seeds.add("nbd_replies", "status", &extents.concat());
    let failed = [
        &[1_u8][..],
        &proto::error_chunk(read, Errno::Io, Some(4096), true),
        &proto::error_chunk(write, Errno::NoSpc, None, true),
    ];
    seeds.add("nbd_replies", "errors", &failed.concat());
}

/// Adds logins that are split into parts, each with a prefix for its flags and a suffix of FFh.
/// This is the format used in the `login` target.
fn logins(seeds: &mut Seeds) {
    for (kind, text) in [
        ("chap", &b"\x81AuthMethod=CHAP,None\0\xff\x81CHAP_A=5,7\0\xff\x81CHAP_N=user\0CHAP_R=0x00112233\0"[..]),
        ("discovery", b"\x81SessionType=Discovery\0AuthMethod=None\0"),
        ("operational", b"\x87HeaderDigest=CRC32C,None\0InitialR2T=No\0FirstBurstLength=65536\0"),
        ("in-parts", b"\x40AuthMeth\xff\x81od=CHAP\0\xff"),
    ] {
        seeds.add("login", kind, text);
    }
}

/// Adds requests for the attributes of an I/O unit, and the responses.
fn device_management(seeds: &mut Seeds) {
    let attributes = [
        (
            "class-port-info",
            Attribute::ClassPortInfo,
            vec![1, 1, 0, 0, 0, 0, 0, 18],
        ),
        (
            "io-unit-info",
            Attribute::IoUnitInfo,
            vec![0, 1, 2, 0, 0x10],
        ),
        (
            "ioc-profile",
            Attribute::IocProfile { slot: 1 },
            vec![0xab; 128],
        ),
        (
            "service-entries",
            Attribute::ServiceEntries {
                slot: 1,
                first: 0,
                last: 1,
            },
            b"SRP.T10:0123456789abcdef".to_vec(),
        ),
    ];
    for (kind, attribute, data) in attributes {
        for (direction, method) in [("get", Method::Get), ("answer", Method::GetResp)] {
            let header = DmHeader {
                method,
                status: Status::Success,
                transaction: 7,
                attribute,
            };
            let data = if direction == "get" { &[][..] } else { &data };
            let mad = header.emit(data);
            let end = mad.iter().rposition(|byte| *byte != 0).unwrap_or(0);
            seeds.add("dm_mad", format!("{kind}-{direction}"), &mad[..=end]);
        }
    }
}

fn mad(seeds: &mut Seeds, name: &str, mad: &[u8]) {
    // Base version, management class and class version for the connection manager.
    if mad[..3] != [1, 7, 2] {
        return;
    }
    let attribute = u16::from_be_bytes([mad[16], mad[17]]);
    seeds.add("cm_message", format!("{name}-{attribute:02x}"), mad);
    if attribute == 0x10 {
        let private = &mad[24 + 140..];
        seeds.add("cma_header", name, private);
        match name {
            "srp" => seeds.add("login_in_private_data", name, &private[36..]),
            "iser" => seeds.add("private_data", name, &private[36..40]),
            _ => {}
        }
    }
}

fn srp(seeds: &mut Seeds, iu: &[u8]) {
    let (target, kind) = match iu[0] {
        // For a command, use the buffer formats as well.
        0x02 => ("from_initiator", format!("02-{:02x}", iu[5])),
        opcode @ (0x00..0x80) => ("from_initiator", format!("{opcode:02x}")),
        // For a response, use the flags as well.
        0xc1 => ("from_target", format!("c1-{:02x}", iu[18])),
        opcode => ("from_target", format!("{opcode:02x}")),
    };
    seeds.add(target, kind, iu);
}

/// Size of the iSER header.
const ISER_HEADER: usize = 28;

fn iser(seeds: &mut Seeds, message: &[u8]) {
    let kind = match message[0] >> 4 {
        1 => format!("{:02x}-{:02x}", message[0], message[ISER_HEADER] & 0x3f),
        _ => format!("{:02x}", message[0]),
    };
    seeds.add("message", kind.as_str(), message);
    if message[0] >> 4 == 1 {
        // The same PDU over TCP. The first byte selects no digests and pieces of 64 bytes.
        let mut stream = vec![0xfc];
        stream.extend_from_slice(&message[ISER_HEADER..]);
        stream.resize(1 + (stream.len() - 1).next_multiple_of(4), 0);
        let opcode = message[ISER_HEADER] & 0x3f;
        seeds.add("stream", format!("{opcode:02x}"), &stream);
        let pdu = &message[ISER_HEADER..];
        let len = u32::from_be_bytes([0, pdu[5], pdu[6], pdu[7]]) as usize;
        if matches!(opcode, 0x03 | 0x23) && len > 0 {
            seeds.add("words", format!("login-{opcode:02x}"), &pdu[48..48 + len]);
        }
    }
}

/// Adds values that are not in the captures.
fn words(seeds: &mut Seeds) {
    for (kind, word) in [
        ("hex", "0x00ff17"),
        ("base64", "0bAP8X"),
        ("iqn", "iqn.2026-01.com.example:disk"),
        ("eui", "eui.0200c0ffee000001"),
        ("address", "[2001:db8::1]:3260,1"),
        (
            "targets",
            "TargetName=iqn.2026-01.com.example:a\0TargetAddress=192.0.2.1:3260,1\0",
        ),
    ] {
        seeds.add("words", kind, word.as_bytes());
    }
}

/// Adds information units that are not in the captures.
fn information_units(seeds: &mut Seeds) {
    let descs = [
        MemDesc::new(0x1000, 0x11, 512),
        MemDesc::new(0x8000, 0x22, 3584),
    ];
    let cmd = Cmd {
        tag: Tag(7),
        lun: [0; 8],
        task_attr: TaskAttr::Simple,
        notify_success: false,
        notify_failure: false,
        cdb: [0x28; 16],
        additional_cdb: &[],
        data_out: DataBuffer::None,
        data_in: DataBuffer::Indirect(IndirectTable {
            table: MemDesc::new(0x9000, 0x33, 32),
            len: 4096,
            inline: &descs,
        }),
    };
    let login = LoginReq {
        tag: Tag(1),
        req_it_iu_len: 8260,
        formats: BufferFormats::DIRECT | BufferFormats::INDIRECT,
        multi_channel: MultiChannelAction::Single,
        flags: LoginReqFlags::empty(),
        immediate: None,
        initiator_port: InitiatorPortId([1; 16]),
        target_port: TargetPortId([2; 16]),
    };
    let abort = TskMgmt {
        tag: Tag(9),
        notify_success: false,
        notify_failure: false,
        lun: [0; 8],
        function: TskMgmtFunction::AbortTask,
        task_tag: Tag(7),
    };
    let mut out = [0; 512];
    for (kind, iu) in [
        ("ours-indirect", FromInitiator::Cmd(cmd)),
        ("ours-login", FromInitiator::LoginReq(login)),
        ("ours-abort", FromInitiator::TskMgmt(abort)),
    ] {
        let len = iu.emit(&mut out);
        seeds.add("from_initiator", kind, &out[..len]);
    }
    let credit = CredReq {
        solicited: false,
        req_lim_delta: 3,
        tag: Tag(2),
    };
    let rejected = LoginRej {
        reason: LoginRejReason::UnableToAssociateChannel,
        tag: Tag(1),
        formats: BufferFormats::DIRECT,
    };
    for (kind, iu) in [
        ("ours-credit", FromTarget::CredReq(credit)),
        ("ours-rejected", FromTarget::LoginRej(rejected)),
    ] {
        let len = iu.emit(&mut out);
        seeds.add("from_target", kind, &out[..len]);
    }
}

/// Adds PDUs that are not in the capture.
fn pdus(seeds: &mut Seeds) {
    let (lun, itt, ttt) = ([0; 8], Itt(7), Ttt::NONE);
    let (cmd_sn, exp_stat_sn) = (CmdSn(5), StatSn(6));
    let text = TextRequest {
        immediate: false,
        is_final: true,
        continues: false,
        lun,
        itt,
        ttt,
        cmd_sn,
        exp_stat_sn,
    };
    let out = DataOut {
        is_final: true,
        lun,
        itt,
        ttt,
        exp_stat_sn,
        data_sn: 0,
        offset: 512,
    };
    let logout = LogoutRequest {
        immediate: true,
        reason: LogoutReason::CloseSession,
        itt,
        cid: Cid(0),
        cmd_sn,
        exp_stat_sn,
    };
    let abort = TmfRequest {
        immediate: true,
        function: TmfFunction::AbortTask,
        lun,
        itt,
        referenced: Itt(4),
        cmd_sn,
        exp_stat_sn,
        ref_cmd_sn: CmdSn(3),
        exp_data_sn: 0,
    };
    let ping = NopOut {
        immediate: true,
        lun,
        itt,
        ttt,
        cmd_sn,
        exp_stat_sn,
    };
    for (pdu, data) in [
        (FromIscsiInitiator::NopOut(ping), &b"ping"[..]),
        (FromIscsiInitiator::TmfRequest(abort), b""),
        (FromIscsiInitiator::TextRequest(text), b"SendTargets=All\0"),
        (FromIscsiInitiator::DataOut(out), &[9; 16]),
        (FromIscsiInitiator::LogoutRequest(logout), b""),
    ] {
        let mut message = Vec::new();
        put_control(
            Buffers::default(),
            pdu.header(),
            &pdu.ahs(),
            data,
            &mut message,
        );
        iser(seeds, &message);
    }
}

fn remove(target: &str, prefix: &str) {
    for entry in std::fs::read_dir(seeds::dir(target)).unwrap() {
        let path = entry.unwrap().path();
        if path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        {
            std::fs::remove_file(path).unwrap();
        }
    }
}

/// The files in the repository must be the same as those created from the captures.
#[test]
fn seeds_match_captures() {
    let made = of_captures().0;
    for (target, of_target) in &made {
        if std::env::var_os("RISER_WRITE_SEEDS").is_some() {
            let dir = seeds::dir(target);
            std::fs::create_dir_all(&dir).unwrap();
            remove(target, "seed-");
            for (name, bytes) in of_target {
                std::fs::write(dir.join(name), bytes).unwrap();
            }
        }
        let found: BTreeMap<_, _> = seeds::load(target).into_iter().collect();
        assert!(
            found == *of_target,
            "{target}: RISER_WRITE_SEEDS=1 writes the seeds"
        );
    }
}

/// All seeds must be accepted by the decoder.
#[test]
fn decoders_accept_seeds() {
    type Takes = fn(&[u8]) -> bool;
    let takes: [(&str, usize, Takes); 9] = [
        ("packet", 15, |b| Packet::parse(b).is_ok()),
        ("cm_message", 8, |b| CmMessage::parse(b).is_ok()),
        ("cma_header", 2, |b| CmaHeader::parse(b).is_ok()),
        ("from_initiator", 6, |b| {
            let immediate = [None, ImmediateDataOffset::new(68)];
            immediate
                .iter()
                .any(|i| FromInitiator::parse(b, *i).is_ok())
        }),
        ("from_target", 5, |b| FromTarget::parse(b).is_ok()),
        ("login_in_private_data", 1, |b| {
            LoginReq::parse_rdma(b).is_ok()
        }),
        ("message", 8, |b| Message::parse(b).is_ok()),
        ("private_data", 1, |b| {
            CmHeader::parse(b) != CmHeader::parse(&[])
        }),
        ("stream", 8, |b| {
            let mut framer = Framer::new(8192);
            framer.set(8192, Digests::default());
            let (used, frame) = framer.next(&b[1..]).unwrap();
            frame.is_some_and(|frame| {
                used == b.len() - 1
                    && (FromIscsiInitiator::parse(&frame).is_ok()
                        || FromIscsiTarget::parse(&frame).is_ok())
            })
        }),
    ];
    for (target, least, takes) in takes {
        let seeds = seeds::load(target);
        for (name, bytes) in &seeds {
            assert!(takes(bytes), "{target} does not take {name}");
        }
        assert!(seeds.len() >= least, "{target} has {} seeds", seeds.len());
    }
}
