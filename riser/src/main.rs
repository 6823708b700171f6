//! `riser`: discovers, attaches, mounts and benchmarks remote logical units. See
//! [`riser::cli`] for the commands.

fn main() -> std::process::ExitCode {
    riser::cli::main()
}
