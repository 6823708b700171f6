//! Checks that a worker doesn't allocate memory for successful reads and writes after warm-up, with
//! any protocol. This includes the channel, the backend and the software NIC, with real sockets and
//! a real ring. Other commands may allocate, and the same applies to data that is received out of
//! order or has to wait.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use riser_scsi::iscsi::keys::Key;
use riser_scsi::iscsi::pdu::{DataOut, FromTarget, TaskAttr};
use riser_scsi::iscsi::{StatSn, Ttt};
use riser_scsi::srp::{DataBuffer, ImmediateDataOffset};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::iser_client;
use riser_test_peers::mini;
use riser_test_peers::mini::{Mini, login_req, real};
use riser_test_peers::open_target;
use riser_test_peers::pdus::{cdb10, pattern};
use riser_test_peers::tcp;
use riser_testkit::alloc::Counting;
use riser_testkit::allocations::{self, allocates_nothing};
use riser_transport::roce::{Roce, RoceConfig};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new(allocations::record);

const IQN: &str = "iqn.2026-01.org.example:disk";
const LENGTHS: [usize; 4] = [512, 4096, 8192, 256 << 10];

fn at(host: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(127, 80, 1, host))
}

fn srp(server: &Server) {
    let dev = Roce::open(&RoceConfig::new(at(2))).unwrap();
    let catalog = server.shared().registry.catalog();
    let port = catalog.targets[0].portals[0].target_port();
    let to = SocketAddr::new(at(1), 5555);
    let mut srp = Mini::connected(dev, to, &login_req(1, port), &mut real);
    srp.clear_unit_attention(&mut real);
    let is_good = |response: mini::Response| assert_eq!(response.status, 0);
    allocates_nothing("SRP", |n| {
        for len in LENGTHS {
            let (data, blocks) = (pattern(len, n), (len / 512) as u16);
            srp.data.write(0, &data);
            is_good(srp.write(8, blocks, 0, &mut real));
            is_good(srp.read(8, blocks, 1 << 20, &mut real));
            let read = srp.data.slice(1 << 20..(1 << 20) + len).unwrap();
            assert!(read.to_vec() == data);
        }
    });
    allocates_nothing("SRP, immediate data", |n| {
        let data = pattern(4096, n);
        let immediate = DataBuffer::Immediate {
            offset: ImmediateDataOffset::new(80).unwrap(),
            len: 4096,
            data: &data,
        };
        let cdb = cdb10(0x2a, 16, 8);
        is_good(srp.command(&cdb, immediate, DataBuffer::None, &mut real));
    });
    allocates_nothing("SRP, many at once", |n| {
        srp.data.write(0, &pattern(32 << 10, n));
        for tag in 0..16 {
            let cdb = cdb10(0x2a, 8 * tag, 8);
            let desc = DataBuffer::Direct(srp.desc(tag as usize * 512, 4096));
            srp.send_cmd(tag.into(), 0, &cdb, desc, DataBuffer::None);
        }
        (0..16).for_each(|_| is_good(srp.receive_response(&mut real)));
    });
    srp.disconnect(&mut real);
}

fn iser() {
    let dev = Roce::open(&RoceConfig::new(at(3))).unwrap();
    let to = SocketAddr::new(at(1), 3260);
    let mut iser = iser_client::Client::connect(dev, to, true, &mut real).unwrap();
    let keys = [(Key::InitialR2T, 0), (Key::FirstBurstLength, 8192)];
    iser.login(Some(IQN), 2, &keys, &mut real).unwrap();
    iser.clear_unit_attention(&mut real);
    for (name, immediate, first_burst) in [
        ("iSER, solicited data", 0, 0),
        ("iSER, immediate data", 8192, 8192),
        ("iSER, unsolicited data", 1000, 8192),
    ] {
        allocates_nothing(name, |n| {
            for len in LENGTHS {
                let data = pattern(len, n);
                assert_eq!(iser.write(8, &data, immediate, first_burst, &mut real), 0);
                assert!(iser.read(8, (len / 512) as u16, &mut real) == (0, data));
            }
        });
    }
    iser.logout(&mut real);
    iser.disconnect(&mut real);
}

fn iscsi() {
    let to = SocketAddr::new(at(1), 3260);
    let mut client = tcp::Client::ready_at(to, IQN, 3);
    for (name, immediate) in [
        ("iSCSI over TCP, solicited data", 0),
        ("iSCSI over TCP, immediate data", 8192),
    ] {
        allocates_nothing(name, |n| {
            for len in LENGTHS {
                let (data, blocks) = (pattern(len, n), (len / 512) as u16);
                let write = cdb10(0x2a, 8, blocks);
                let first = &data[..len.min(immediate)];
                client.send_with(TaskAttr::Simple, &write, true, len as u32, first);
                finish_write(&mut client, &data);
                let (status, read) =
                    client.command(&cdb10(0x28, 8, blocks), false, len as u32, &[]);
                assert!(status == 0 && read == data);
            }
        });
    }
    allocates_nothing("iSCSI over TCP, many at once", |n| {
        let data = pattern(4096, n);
        for at in 0..16 {
            client.send_command(&cdb10(0x2a, 8 * at, 8), true, 4096, &data);
        }
        (0..16).for_each(|_| assert_eq!(client.receive_response().0, 0));
    });
}

/// Sends the requested data until the write is completed.
fn finish_write(client: &mut tcp::Client, data: &[u8]) {
    loop {
        match client.receive().unwrap().0 {
            FromTarget::R2t(r2t) => {
                let pdu = DataOut {
                    is_final: true,
                    lun: [0; 8],
                    itt: r2t.itt,
                    ttt: r2t.ttt,
                    exp_stat_sn: StatSn(0),
                    data_sn: 0,
                    offset: r2t.offset,
                };
                assert_ne!(r2t.ttt, Ttt::NONE);
                let range = r2t.offset as usize..(r2t.offset + r2t.len) as usize;
                client.send(pdu.header(), &data[range]);
            }
            FromTarget::ScsiResponse(response) => return assert_eq!(response.status, 0),
            other => panic!("{other:?}"),
        }
    }
}

fn serve(backend: &str) -> Server {
    let listen = at(1);
    let portals = ["srp", "iser", "iscsi"].map(|protocol| (protocol, listen.to_string()));
    let disk = format!("d: {{ {backend}, size: 16MiB }}");
    let text = open_target(IQN, &portals, &disk, "0: d", "workers: { count: 1 }\n");
    Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap()
}

#[test]
fn reads_and_writes_allocate_nothing() {
    let image = std::env::temp_dir().join(format!("riser-allocations-{}", std::process::id()));
    let file = format!("kind: file, path: {}, create: true", image.display());
    for backend in ["kind: ram", &file] {
        let server = serve(backend);
        srp(&server);
        iser();
        iscsi();
        server.shutdown().unwrap();
    }
    std::fs::remove_file(image).unwrap();
}
