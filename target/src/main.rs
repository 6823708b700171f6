//! `riserd`: serves files and block devices as SCSI disks over RDMA and TCP.

use std::process::ExitCode;

fn main() -> ExitCode {
    riser_target::cli::main(|source| {
        riser_target::sandbox::confine(source.handover.takes_over());
        Ok(riser_target::control::run(source)?)
    })
}
