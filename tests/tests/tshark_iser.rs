//! Uses Wireshark's dissectors to check an iSER session with login, I/O in both directions, sense
//! data and logout.

#![allow(missing_docs, reason = "a test")]

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::keys::Key;
use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::iser_client::Client;
use riser_testkit::programs::{missing, skip};
use riser_tests::dissect::dissect;
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::Provider;

const IQN: &str = "iqn.2026-01.org.example:disk";

/// Runs a session and captures its packets in both directions.
fn session(capture: &Path) {
    let text = format!(
        "identity: test\nbackends: {{ d: {{ kind: ram, size: 16MiB }} }}\n\
         targets:\n  - name: t\n    iqn: {IQN}\n    luns: {{ 0: d }}\n    access: open\n\
         \x20   portals: [{{ protocol: iser, listen: 127.0.74.1 }}]\n"
    );
    let server = Server::start(&Config::parse(&text, "test.yaml").unwrap()).unwrap();
    let mut roce = RoceConfig::new("127.0.74.2".parse().unwrap());
    roce.capture = Some(capture.to_owned());
    let dev = Roce::open(&roce).unwrap();
    let pump = &mut |dev: &mut Roce| {
        if dev.progress(Instant::now()) == 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
    };
    let mut client = Client::connect(dev, "127.0.74.1:3260".parse().unwrap(), true, pump).unwrap();
    let keys = [(Key::InitialR2T, 0), (Key::FirstBurstLength, 65536)];
    client.login(Some(IQN), 1, &keys, pump).unwrap();
    client.clear_unit_attention(pump);
    // Data is sent by READ, along with the command, as separate data, and as a combination of
    // these.
    for (len, immediate, first_burst) in [
        (8192, 0, 0),
        (4096, 4096, 0),
        (4096, 512, 4096),
        (1 << 19, 8192, 0),
    ] {
        let data = vec![0x5a; len];
        assert_eq!(client.write(0, &data, immediate, first_burst, pump), 0);
        assert_eq!(client.read(0, (len / 512) as u16, pump), (0, data));
    }
    assert_eq!(
        client.read(1 << 30, 1, pump).0,
        2,
        "a response with sense data"
    );
    client.logout(pump);
    client.disconnect(pump);
    server.shutdown().unwrap();
}

#[test]
fn tshark_decodes_iser_session() {
    if missing(&["tshark"]).is_some() {
        return skip("tshark_iser", "tshark is not installed");
    }
    let capture = std::env::temp_dir().join(format!("riser-iser-{}.pcap", std::process::id()));
    session(&capture);
    let rows = dissect(&capture, &["rpcordma", "smb_direct", "nvme-rdma"]);
    std::fs::remove_file(&capture).unwrap();
    let iser = rows.iter().filter(|row| row.protocols.contains("iser"));
    assert!(iser.count() > 20, "{rows:?}");
    let opcodes: BTreeSet<_> = rows.iter().map(|row| row.opcode.as_str()).collect();
    // SEND only, with invalidate; WRITE first and only; READ request; READ response first.
    for opcode in ["4", "23", "6", "10", "12", "13"] {
        assert!(
            opcodes.contains(opcode),
            "no opcode {opcode} in {opcodes:?}"
        );
    }
    let infos: BTreeSet<_> = rows.iter().map(|row| row.info.as_str()).collect();
    for word in [
        "Login Command",
        "Login Response",
        "SCSI: Write(10)",
        "SCSI: Read(10)",
        "Logout Response",
    ] {
        assert!(
            infos.iter().any(|info| info.contains(word)),
            "no {word} among {infos:?}"
        );
    }
}
