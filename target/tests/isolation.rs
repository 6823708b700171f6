//! Tests hanging initiators and disks, with healthy ones on the same worker.

use std::collections::VecDeque;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use riser_scsi::iscsi::frame;
use riser_scsi::iscsi::pdu::{FromTarget, R2t};
use riser_target::backend::{Fault, FaultOn, Faults};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::open_target;
use riser_test_peers::pdus::{data_out, scsi_command};
use riser_test_peers::tcp::{Client, free_port};

/// Serves two files, the first of which is large.
fn text(port: u16, one: &Path, other: &Path, rest: &str) -> String {
    let portals = [("iscsi", format!("127.0.0.1:{port}"))];
    let (one, other) = (one.display(), other.display());
    let backends = format!(
        "one: {{ kind: file, path: {one}, size: 256MiB, create: true }}, \
         other: {{ kind: file, path: {other}, size: 1MiB, create: true }}"
    );
    let (iqn, luns) = ("iqn.2026-01.org.example:t", "0: one, 1: other");
    open_target(iqn, &portals, &backends, luns, rest)
}

/// Sends the data requested by R2Ts at this rate in bytes per second until `is_over` is set.
fn trickle(hog: &mut Client, rate: u64, is_over: &AtomicBool) {
    let begin = Instant::now();
    hog.socket
        .set_read_timeout(Some(Duration::from_millis(10)))
        .unwrap();
    // R2T with the DataSN and the number of bytes already sent.
    let mut requested: VecDeque<(R2t, u32, u32)> = VecDeque::new();
    let mut sent = 0;
    while !is_over.load(Ordering::Relaxed) {
        match hog.receive() {
            Some((FromTarget::R2t(r2t), ..)) => requested.push_back((r2t, 0, 0)),
            Some(_) => {}
            // No PDU was received.
            None => std::thread::sleep(Duration::from_millis(5)),
        }
        let allowed = begin.elapsed().as_millis() as u64 * rate / 1000;
        while let Some((r2t, sn, at)) = requested.front_mut()
            && sent < allowed
        {
            let len = (r2t.len - *at).min(8192).min((allowed - sent) as u32);
            let is_last = *at + len == r2t.len;
            let pdu = data_out(r2t.itt.0, r2t.ttt, *sn, r2t.offset + *at, is_last);
            let mut bytes = Vec::new();
            let data = vec![1; len as usize];
            frame::put_pdu(pdu.header(), &[], &data, hog.digests, &mut bytes);
            // The target has closed the connection.
            if hog.socket.write_all(&bytes).is_err() {
                return;
            }
            (*sn, *at, sent) = (*sn + 1, *at + len, sent + u64::from(len));
            if is_last {
                requested.pop_front();
            }
        }
    }
}

/// An initiator with many WRITEs sends their data at different rates, from no data to a rate that
/// is accepted without a limit. `trickle.rs` tests the same over RDMA.
#[test]
fn trickling_initiator_delays_no_other() {
    for (n, rate) in [0, 1, 100, 1 << 10, 16 << 10, 256 << 10, 1 << 20]
        .into_iter()
        .enumerate()
    {
        let waited = latency_during_trickle(n, rate);
        assert!(
            waited < Duration::from_secs(3),
            "with {rate} B/s, a WRITE of 4 KiB to another unit has taken {waited:?}"
        );
    }
}

/// Returns the maximum latency of a WRITE to another unit.
fn latency_during_trickle(n: usize, rate: u64) -> Duration {
    let port = free_port();
    let image =
        |disk| Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("isolation-{n}-{disk}.img"));
    let rest = "workers: { count: 1 }\nlimits: { buffer_pool_mib: 8 }\n";
    let text = text(port, &image(0), &image(1), rest);
    let config = Config::parse(&text, "test.yaml").unwrap();
    let server = Server::start(&config).unwrap();
    let target = "iqn.2026-01.org.example:t";
    let mut hog = Client::login(port, target, 1, None).unwrap();
    hog.command(&[0; 6], false, 0, &[]);
    for tag in 0..120_u32 {
        let mut cdb = [0; 16];
        cdb[0] = 0x8a;
        cdb[2..10].copy_from_slice(&u64::from(tag * 2048).to_be_bytes());
        cdb[10..14].copy_from_slice(&2048_u32.to_be_bytes());
        let command = scsi_command(1000 + tag, hog.cmd_sn, &cdb, true, 1 << 20);
        hog.cmd_sn += 1;
        hog.send(command.header(), &[]);
    }
    let is_over = AtomicBool::new(false);
    let waited = std::thread::scope(|scope| {
        scope.spawn(|| trickle(&mut hog, rate, &is_over));
        std::thread::sleep(Duration::from_secs(1));
        let mut client = Client::login(port, target, 2, None).unwrap();
        let send = |client: &mut Client, cdb: &[u8], data: &[u8]| {
            client.send_to(1, cdb, data, 0);
            client.receive().unwrap();
        };
        // These don't need any memory.
        send(&mut client, &[0; 6], &[]);
        send(&mut client, &[0; 6], &[]);
        let waited = (0..20).map(|_| {
            let since = Instant::now();
            send(&mut client, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0], &[7; 4096]);
            since.elapsed()
        });
        let waited = waited.max().unwrap();
        is_over.store(true, Ordering::Relaxed);
        waited
    });
    drop(hog);
    server.shutdown().unwrap();
    waited
}

/// Commands that are waiting for a hanging disk keep their buffers, but must leave memory for other
/// disks.
#[test]
fn hung_disk_delays_no_other_disk() {
    const HANGS: Duration = Duration::from_secs(25);
    let port = free_port();
    let image = |n| Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("isolation-{n}.img"));
    let text = text(port, &image(2), &image(3), "workers: { count: 1 }\n");
    let mut config = Config::parse(&text, "test.yaml").unwrap();
    let hung = config.backends.iter_mut().find(|b| b.name == "one");
    hung.unwrap().spec.faults = Some(Arc::new(Faults::new(vec![Fault {
        on: FaultOn::Read,
        offset: 0,
        len: 256 << 20,
        times: None,
        delay: HANGS,
        error: None,
    }])));
    let server = Server::start(&config).unwrap();
    let target = "iqn.2026-01.org.example:t";
    let mut user = Client::login(port, target, 1, None).unwrap();
    user.command(&[0; 6], false, 0, &[]);
    for tag in 0..120_u32 {
        let mut cdb = [0; 16];
        cdb[0] = 0x88;
        cdb[2..10].copy_from_slice(&u64::from(tag * 2048).to_be_bytes());
        cdb[10..14].copy_from_slice(&2048_u32.to_be_bytes());
        let command = scsi_command(1000 + tag, user.cmd_sn, &cdb, false, 1 << 20);
        user.cmd_sn += 1;
        user.send(command.header(), &[]);
    }
    std::thread::sleep(Duration::from_secs(1));
    let mut client = Client::login(port, target, 2, None).unwrap();
    let mut send = |cdb: &[u8], data: &[u8], read: u32| {
        let (tag, writes) = (client.cmd_sn, !data.is_empty());
        let len = read.max(data.len() as u32);
        let mut command = scsi_command(tag, client.cmd_sn, cdb, writes, len);
        command.lun[1] = 1;
        client.cmd_sn += 1;
        let since = Instant::now();
        client.send(command.header(), data);
        client.receive().unwrap();
        since.elapsed()
    };
    send(&[0; 6], &[], 0);
    send(&[0; 6], &[], 0);
    let read = send(&[0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0], &[], 4096);
    let write = send(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0], &[7; 4096], 0);
    drop(server);
    let most = Duration::from_secs(5);
    assert!(
        read < most && write < most,
        "of another disk, a READ of 4 KiB has taken {read:?}, a WRITE after it {write:?}"
    );
}
