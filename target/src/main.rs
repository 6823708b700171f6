//! `riserd`: serves files and block devices as SCSI disks over RDMA and TCP.

use std::process::ExitCode;

fn main() -> ExitCode {
    riser_target::cli::main(|source| Ok(riser_target::control::run(source)?))
}
