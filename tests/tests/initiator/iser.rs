//! iSER, using either the engine in the same process, or `riser` and `riserd`.

use std::time::Duration;

use riser_block::task::block_on;
use riser_initiator::engine::{IoData, ScsiIo};
use riser_initiator::request::RequestError;
use riser_initiator::scsi::{BlockRange, Command};
use riser_testkit::programs::{missing, skip};
use riser_tests::rig::{IQN, Protocol, Rig, buffer_of, get, pair, pattern};

use super::load_survives_restart;

#[test]
fn buffer_with_too_many_pieces_is_rejected() {
    let rig = Rig::new(Protocol::Iser, 92, "{ kind: ram, size: 1MiB }");
    let session = rig.connect("");
    let lun = block_on(session.lun(0)).unwrap();
    let send = |count: usize| {
        let buffers = (0..count)
            .map(|i| buffer_of(&lun, &pattern(i as u64, 512)))
            .collect();
        let range = BlockRange {
            lba: 8,
            blocks: count as u32,
        };
        let command = Command::write(range, range.blocks * 512, false);
        let data = IoData::Many(buffers);
        let io = ScsiIo::new(lun.info().lun, command, data, Duration::from_secs(30));
        block_on(session.submit(io)).result
    };
    assert_eq!(send(3).unwrap().status, 0);
    assert!(matches!(send(4), Err(RequestError::NotStarted(_))));
    assert!(get(&lun, 5120, 512) == pattern(2, 512));
}

#[test]
fn attached_disk_keeps_data() {
    if let Some(tool) = missing(&["fio", "nbdinfo"]) {
        return skip("initiator", &format!("{tool} is not installed"));
    }
    let mut pair = pair(97, "iser", "");
    let url = format!("iser://127.0.97.1/{IQN}/0");
    let socket = pair.path("nbd");
    pair.riser(&["attach", &url, "--nbd", &socket]);
    load_survives_restart(&mut pair, &socket);
}
