//! `riser`: discovers, attaches, mounts and benchmarks remote logical units. See
//! [`riser_initiator::cli`] for the commands.

fn main() -> std::process::ExitCode {
    riser_initiator::cli::main()
}
