//! Uses Wireshark's dissectors to check a whole session with port query, logins, I/O and logout.

#![allow(missing_docs, reason = "a test")]

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use riser_block::Buffer;
use riser_block::task::block_on;
use riser_initiator::engine::Client;
use riser_initiator::lun::Lun;
use riser_initiator::url::SrpUrl;
use riser_target::config::Config;
use riser_target::server::Server;
use riser_testkit::programs::{missing, skip};
use riser_tests::dissect::dissect;
use riser_transport::roce::{Roce, RoceConfig};

fn buffer(lun: &Lun, len: usize) -> Buffer {
    let buffer = block_on(lun.buffers().take_buffer(len));
    buffer.slice().fill(0, len, 0x5a);
    buffer
}

/// Runs a session and captures its packets in both directions.
fn session(capture: &Path) {
    let text = "identity: test\n\
                backends:\n  disk: { kind: ram, size: 16MiB }\n\
                targets:\n  - name: t\n    portals: [{ protocol: srp, listen: 127.0.73.1 }]\n    \
                luns: { 0: disk }\n    access: open\n";
    let config = Config::parse(text, "test.yaml").unwrap_or_else(|e| panic!("{e}"));
    let server = Server::start(&config).unwrap();
    let mut roce = RoceConfig::new(Ipv4Addr::new(127, 0, 73, 2).into());
    roce.capture = Some(capture.to_owned());
    let client = Client::builder()
        .pool(8 << 20)
        .build(move || Roce::open(&roce))
        .unwrap();
    let url: SrpUrl = "srp://127.0.73.1/0?channels=2".parse().unwrap();
    let session = block_on(client.connect(&url)).unwrap();
    let lun = block_on(session.lun(0)).unwrap();
    // Use immediate data, a single packet, and many packets; both direct and with READ.
    for len in [512, 8192, 65536, 1 << 20] {
        block_on(lun.write(0, buffer(&lun, len), false)).unwrap();
        block_on(lun.read(0, buffer(&lun, len))).unwrap();
    }
    // If this machine is busy, packets can be lost. READ requests are then small until the window
    // has recovered.
    for _ in 0..16 {
        block_on(lun.write(0, buffer(&lun, 1 << 20), false)).unwrap();
    }
    block_on(lun.flush()).unwrap();
    let beyond = block_on(lun.read(64 << 20, buffer(&lun, 512)));
    assert!(beyond.is_err(), "a response with sense data");
    block_on(session.close());
    // A session that is rejected.
    let stranger: SrpUrl = "srp://127.0.73.1/0?id_ext=1&ioc_guid=2".parse().unwrap();
    assert!(block_on(client.connect(&stranger)).is_err());
    std::thread::sleep(Duration::from_millis(100));
    drop((lun, session));
    client.shutdown();
    server.shutdown().unwrap();
}

#[test]
fn tshark_decodes_srp_session() {
    if missing(&["tshark"]).is_some() {
        return skip("tshark_session", "tshark is not installed");
    }
    let capture = std::env::temp_dir().join(format!("riser-session-{}.pcap", std::process::id()));
    session(&capture);
    // These dissectors try to guess the payload type, and would find packets that don't exist.
    let guesses = ["rpcordma", "smb_direct", "nvme-rdma", "iser"];
    let rows = dissect(&capture, &guesses);
    std::fs::remove_file(&capture).unwrap();
    let opcodes: BTreeSet<_> = rows.iter().map(|row| row.opcode.as_str()).collect();
    let infos: BTreeSet<_> = rows.iter().map(|row| row.info.as_str()).collect();
    let seen = |word: &str| infos.iter().any(|i| i.contains(word));
    for word in [
        "ConnectRequest",
        "ConnectReply",
        "ReadyToUse",
        "ConnectReject",
        "DisconnectRequest",
        "DisconnectReply",
    ] {
        assert!(seen(word), "no {word} among {infos:?}");
    }
    // SEND only, WRITE first, middle, last, READ request, READ responses, acknowledgement,
    // datagram.
    for opcode in [4, 6, 7, 8, 12, 13, 14, 15, 17, 100] {
        assert!(
            opcodes.contains(opcode.to_string().as_str()),
            "no opcode {opcode} in {opcodes:?}"
        );
    }
}
