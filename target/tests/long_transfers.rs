//! Tests 32 MiB commands over each protocol, with a pool that only has space for two pieces of a
//! command.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;
use std::time::Duration;

use riser_scsi::iscsi::pdu::{DataOut, FromTarget, R2t, TaskAttr, TmfFunction, TmfRequest};
use riser_scsi::iscsi::{CmdSn, Itt, StatSn};
use riser_scsi::srp::{DataBuffer, IndirectTable, MemDesc};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::iser_client;
use riser_test_peers::mini::{Mini, login_req, real};
use riser_test_peers::open_target;
use riser_test_peers::tcp::Client;
use riser_testkit::eventually;
use riser_transport::roce::{Roce, RoceConfig};

const IQN: &str = "iqn.2026-01.org.example:disk";
const LONGEST: usize = 32 << 20;

fn at(net: u8, host: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(127, 79, net, host))
}

/// Uses default limits except for the pool.
fn start(net: u8, limits: &str) -> Server {
    let listen = at(net, 1);
    let portals = ["iser", "iscsi", "srp"].map(|protocol| (protocol, listen.to_string()));
    let rest = format!("workers: {{ count: 1 }}\nlimits: {{ buffer_pool_mib: 2{limits} }}\n");
    let text = open_target(
        IQN,
        &portals,
        "d: { kind: ram, size: 40MiB }",
        "0: d",
        &rest,
    );
    Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap()
}

fn connect(net: u8, isid: u8) -> Client {
    let to = SocketAddr::new(at(net, 1), 3260);
    Client::ready_at(to, IQN, isid)
}

fn cdb16(opcode: u8, flags: u8, lba: u64, blocks: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (opcode, flags);
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i % 251) as u8 ^ (i >> 20) as u8 ^ seed)
        .collect()
}

/// Sends the data for an R2T.
fn send_data(client: &mut Client, r2t: R2t, data: &[u8]) {
    let whole = &data[r2t.offset as usize..(r2t.offset + r2t.len) as usize];
    let pieces = whole.chunks(256 << 10);
    let last = pieces.len() - 1;
    for (n, piece) in pieces.enumerate() {
        let pdu = DataOut {
            is_final: n == last,
            lun: [0; 8],
            itt: r2t.itt,
            ttt: r2t.ttt,
            exp_stat_sn: StatSn(0),
            data_sn: n as u32,
            offset: r2t.offset + n as u32 * (256 << 10),
        };
        client.send(pdu.header(), piece);
    }
}

/// Sends a command with Data-Out. Returns the status.
fn send_out(client: &mut Client, cdb: &[u8], data: &[u8]) -> u8 {
    client.send_with(TaskAttr::Simple, cdb, true, data.len() as u32, &[]);
    loop {
        match client.receive().expect("response").0 {
            FromTarget::R2t(r2t) => send_data(client, r2t, data),
            FromTarget::ScsiResponse(response) => return response.status,
            other => panic!("{other:?}"),
        }
    }
}

fn idle_pool(server: &Server) {
    eventually("the pool is whole again", Duration::from_secs(20), || {
        let snapshot = &server.snapshot()[0];
        snapshot.pool_free == snapshot.pool_size
    });
}

#[test]
fn longest_transfer_exceeds_pool() {
    let server = start(1, "");
    let mut client = connect(1, 1);
    let (status, page) = client.command(&[0x12, 1, 0xb0, 0, 64, 0], false, 64, &[]);
    assert_eq!(status, 0);
    let field = |at: usize| u32::from_be_bytes(page[at..at + 4].try_into().unwrap());
    assert_eq!(field(8), 65_536, "MAXIMUM TRANSFER LENGTH");
    assert_eq!(field(12), 2048, "OPTIMAL TRANSFER LENGTH");

    let data = pattern(LONGEST, 1);
    assert_eq!(send_out(&mut client, &cdb16(0x8a, 0, 5, 65_536), &data), 0);
    let read = client.command(&cdb16(0x88, 0, 5, 65_536), false, LONGEST as u32, &[]);
    assert!(read == (0, data.clone()));
    // VERIFY (16) and WRITE AND VERIFY (16) with byte-by-byte comparison.
    assert_eq!(send_out(&mut client, &cdb16(0x8f, 2, 5, 65_536), &data), 0);
    let other = pattern(LONGEST, 2);
    assert_eq!(send_out(&mut client, &cdb16(0x8f, 2, 5, 65_536), &other), 2);
    assert_eq!(send_out(&mut client, &cdb16(0x8e, 2, 5, 65_536), &other), 0);
    let one_more = client.command(&cdb16(0x88, 0, 5, 65_537), false, 0, &[]);
    assert_eq!(one_more.0, 2, "beyond the longest");
    idle_pool(&server);
    server.shutdown().unwrap();
}

/// Multiple concurrent commands, each larger than the entire pool, must all complete.
#[test]
fn protocols_transfer_long_data_concurrently() {
    const BLOCKS: u16 = 65_535;
    const LEN: usize = BLOCKS as usize * 512;
    let server = start(2, "");
    let threads: Vec<_> = (1..=3)
        .map(|n| {
            thread::spawn(move || {
                let mut client = connect(2, n);
                let (len, lba) = (4 << 20, 49_152 + u64::from(n) * 8192);
                for round in 0..4 {
                    let data = pattern(len, n * 16 + round);
                    assert_eq!(send_out(&mut client, &cdb16(0x8a, 0, lba, 8192), &data), 0);
                    let read = client.command(&cdb16(0x88, 0, lba, 8192), false, len as u32, &[]);
                    assert!(read == (0, data));
                }
            })
        })
        .collect();
    let to = |port| SocketAddr::new(at(2, 1), port);
    let dev = Roce::open(&RoceConfig::new(at(2, 2))).unwrap();
    let mut iser = iser_client::Client::connect(dev, to(3260), true, &mut real).unwrap();
    iser.login(Some(IQN), 9, &[], &mut real).unwrap();
    iser.clear_unit_attention(&mut real);
    let data = pattern(LEN, 3);
    // As much as possible before the blocks used by the other protocols.
    let short = &data[..24 << 20];
    assert_eq!(iser.write(0, short, 8192, 0, &mut real), 0);
    assert!(iser.read(0, 49_152, &mut real) == (0, short.to_vec()));
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(iser.write(7, &data, 0, 0, &mut real), 0);
    assert!(iser.read(7, BLOCKS, &mut real) == (0, data.clone()));
    iser.logout(&mut real);
    iser.disconnect(&mut real);

    // SRP, with a table that uses the same memory repeatedly.
    let dev = Roce::open(&RoceConfig::new(at(2, 3))).unwrap();
    let catalog = server.shared().registry.catalog();
    let port = catalog.targets[0].portals[0].target_port();
    let mut srp = Mini::connected(dev, to(5555), &login_req(1, port), &mut real);
    srp.clear_unit_attention(&mut real);
    let piece = 3 << 20;
    let descs: Vec<MemDesc> = (0..LEN.div_ceil(piece))
        .map(|_| srp.desc(0, piece as u32))
        .collect();
    let table = |descs| {
        DataBuffer::Indirect(IndirectTable {
            table: MemDesc::new(0, 0, 11 * 16),
            len: LEN as u32,
            inline: descs,
        })
    };
    let memory = pattern(piece, 4);
    srp.data.write(0, &memory);
    let cdb = cdb16(0x8a, 0, 9, BLOCKS.into());
    let response = srp.command(&cdb, table(&descs), DataBuffer::None, &mut real);
    assert_eq!(response.status, 0);
    let expected: Vec<u8> = memory.iter().copied().cycle().take(LEN).collect();
    let mut tcp = connect(2, 5);
    let cdb = cdb16(0x88, 0, 9, BLOCKS.into());
    assert!(tcp.command(&cdb, false, LEN as u32, &[]) == (0, expected));
    let other = pattern(LEN, 5);
    let write = cdb16(0x8a, 0, 9, BLOCKS.into());
    assert_eq!(send_out(&mut tcp, &write, &other), 0);
    let response = srp.command(&cdb, DataBuffer::None, table(&descs), &mut real);
    assert_eq!(response.status, 0);
    // The memory contains the last data that was read.
    let tail = LEN % piece;
    let got = srp.data.slice(0..piece).unwrap().to_vec();
    assert!(got[..tail] == other[LEN - tail..]);
    assert!(got[tail..] == other[LEN - piece..LEN - tail]);
    srp.disconnect(&mut real);
    drop(tcp);
    idle_pool(&server);
    server.shutdown().unwrap();
}

/// An initiator that stops in the middle of an ORWRITE, which blocks other commands for its blocks,
/// must be disconnected. An initiator that aborts such a command can continue.
#[test]
fn stopped_command_releases_resources() {
    let server = start(3, ", data_out_timeout: 1");
    let data = vec![0x11; 4 << 20];
    let mut silent = connect(3, 1);
    let begin = |client: &mut Client| {
        let cdb = cdb16(0x8b, 0, 0, 8192);
        client.send_with(TaskAttr::Simple, &cdb, true, 4 << 20, &[]);
        // Send the entire first piece, and nothing of the second one.
        loop {
            let (FromTarget::R2t(r2t), ..) = client.receive().unwrap() else {
                panic!("an R2T");
            };
            if r2t.offset == 1 << 20 {
                return;
            }
            send_data(client, r2t, &data);
        }
    };
    begin(&mut silent);
    let mut other = connect(3, 2);
    let write = cdb16(0x8a, 0, 3, 1);
    assert_eq!(other.command(&write, true, 512, &[0x22; 512]).0, 0);
    assert!(silent.receive().is_none(), "it was cut off");

    let mut aborts = connect(3, 3);
    begin(&mut aborts);
    let request = TmfRequest {
        immediate: true,
        function: TmfFunction::AbortTask,
        lun: [0; 8],
        itt: Itt(1000),
        referenced: Itt(aborts.cmd_sn - 1),
        cmd_sn: CmdSn(aborts.cmd_sn),
        exp_stat_sn: StatSn(0),
        ref_cmd_sn: CmdSn(aborts.cmd_sn - 1),
        exp_data_sn: 0,
    };
    aborts.send(request.header(), &[]);
    assert!(matches!(
        aborts.receive(),
        Some((FromTarget::TmfResponse(_), ..))
    ));
    assert_eq!(aborts.command(&write, true, 512, &[0x33; 512]).0, 0);
    let read = cdb16(0x88, 0, 2, 2);
    let expected = [vec![0x11; 512], vec![0x33; 512]].concat();
    assert_eq!(other.command(&read, false, 1024, &[]), (0, expected));
    drop((silent, other, aborts));
    idle_pool(&server);
    server.shutdown().unwrap();
}
