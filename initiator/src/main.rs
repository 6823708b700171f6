//! `riser`: finds, attaches, mounts and benchmarks remote logical units. The verbs are in
//! [`riser_initiator::cli`].

fn main() -> std::process::ExitCode {
    riser_initiator::cli::main()
}
