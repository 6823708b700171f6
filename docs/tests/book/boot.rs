//! Compares the recipe for disks at boot with the unit that it relies on.

use std::fs;

use riser_docs::{documents, root};

use crate::all_right;

#[test]
fn fstab_lines_are_ordered_after_their_unit() {
    let unit = root().join("deploy/systemd/attachments/riser@.service");
    let unit = fs::read_to_string(unit).expect("the unit");
    let has = |line: &str| unit.lines().any(|l| l == line);
    // A unit that restarts while its target is unavailable must not delay the boot targets.
    assert!(has("DefaultDependencies=no"));
    assert!(!has("Before=remote-fs-pre.target"));
    assert!(has("Before=shutdown.target"));
    assert!(has("Conflicts=shutdown.target"));
    assert!(has("Wants=modprobe@ublk_drv.service"));
    assert!(has("StartLimitIntervalSec=0"));
    let pages = documents();
    let blocks = pages.iter().flat_map(riser_docs::Page::blocks);
    let lines: Vec<String> = blocks
        .filter(|block| block.language == "fstab")
        .flat_map(|block| block.text.lines().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    assert!(lines.len() >= 2, "{lines:?}");
    let wrong = lines.iter().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let options: Vec<&str> = fields.get(3)?.split(',').collect();
        let is_ordered = options.contains(&"_netdev")
            && options.contains(&"nofail")
            && options.contains(&"x-systemd.requires=riser@disk1.service")
            && options.contains(&"x-systemd.wanted-by=riser@disk1.service");
        (fields.len() != 6 || !is_ordered).then(|| line.clone())
    });
    all_right(&wrong.collect::<Vec<_>>());
}
