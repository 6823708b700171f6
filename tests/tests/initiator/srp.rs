//! SRP: descriptor tables.

use riser_block::task::block_on;
use riser_tests::rig::{Protocol, Rig, scattered};

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
