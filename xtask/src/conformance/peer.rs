//! Runs the suite on `tgt` for comparison. This is the other user-space iSCSI target included in
//! Debian.

use std::fs::File;

use super::suite::Run;
use super::{IQN, Options, SIZE, run_suite};
use crate::packages::{ensure, needs};
use crate::tgt::Tgt;
use crate::{Failure, sh};

/// Runs the suite on the other target. Returns `None` if this is not possible.
pub(super) fn run(options: &Options, scratch: &sh::Scratch) -> Option<Run> {
    if !ensure(needs("conformance-tgt")).is_empty() {
        return None;
    }
    let run = || -> Result<Run, Failure> {
        let image = scratch.join("tgt.img");
        File::create(&image)?.set_len(SIZE)?;
        let tgt = Tgt::start(&image, IQN, &scratch.join("tgt.log"))?;
        tgt.update("thin_provisioning=1")?;
        let tests = options.tests.as_deref().unwrap_or("ALL");
        let (run, ended) = run_suite(options, tests, tgt.url(), scratch, "tgt")?;
        if let Some(how) = ended {
            println!("against tgt, iscsi-test-cu {how}");
        }
        Ok(run)
    };
    run()
        .inspect_err(|error| println!("cannot compare with tgt: {error}"))
        .ok()
}
