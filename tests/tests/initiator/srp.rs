//! SRP: descriptor tables and redirection.

use riser_block::task::block_on;
use riser_tests::rig::{Protocol, Rig, get, pattern, put, scattered};
use riser_transport::rc::RcCounters;

#[test]
fn scattered_buffers_travel_in_tables() {
    let rig = Rig::new(Protocol::Srp, 62, "{ kind: ram, size: 16MiB }");
    let lens: Vec<usize> = (0..12).map(|i| 1024 + 512 * i).collect();
    for keys in [
        "?immediate=0",
        "?immediate=0&cmd_sg_entries=2&allow_ext_sg=1",
        "?immediate=0&register_always=0&cmd_sg_entries=2&allow_ext_sg=1",
    ] {
        let session = rig.connect(keys);
        let lun = block_on(session.lun(0)).unwrap();
        scattered(&lun, &lens, keys);
        block_on(session.close());
    }
}

#[test]
fn redirecting_portal_sends_logins_elsewhere() {
    let mut rig = Rig::new(Protocol::Srp, 63, "{ kind: ram, size: 16MiB }");
    let redirect = format!(", redirect: {{ to: {} }}", rig.address(3));
    rig.serve_portals(&[(1, &redirect), (3, "")]);
    let url = rig.url_on(1, "", "?channels=2");
    let session = block_on(rig.client.connect(url)).unwrap();
    let lun = block_on(session.lun(0)).unwrap();
    put(&lun, 4096, &pattern(1, 8192));
    assert!(get(&lun, 4096, 8192) == pattern(1, 8192));
    let snapshots = rig.server.as_ref().unwrap().snapshot();
    let channels = snapshots.iter().map(|s| s.sessions.len());
    assert_eq!(channels.sum::<usize>(), 2);
    // Only the other portal has connections.
    for (host, is_used) in [(1, false), (3, true)] {
        let addr = std::net::IpAddr::from(rig.address(host));
        let devices = snapshots.iter().flat_map(|s| &s.devices);
        let counters = devices.filter(|d| d.addr == addr).filter_map(|d| d.nic);
        let used = counters.filter(|nic| nic.rc != RcCounters::default());
        assert_eq!(used.count() > 0, is_used, "{addr}");
    }
    let rejects = snapshots.iter().flat_map(|s| s.rejects.iter());
    assert_eq!(rejects.map(|(_, count)| count).sum::<u64>(), 2);
    block_on(session.close());
}
