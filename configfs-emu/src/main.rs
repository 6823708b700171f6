//! `riserd-configfs`: a running `riserd` as LIO's configfs tree.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use clap::Parser;
use riser_configfs_emu::daemon::{self, Riserd};
use riser_configfs_emu::engine::Engine;
use riser_configfs_emu::fuse::Mount;
use riser_configfs_emu::host::Host;
use riser_target::control::socket;
use tracing_subscriber::EnvFilter;

/// Shows a running riserd as LIO's configfs tree, for targetcli, rtslib and scripts, until it is
/// unmounted. Says on standard error what is not shown, refused, or without effect.
#[derive(Debug, Parser)]
#[command(name = "riserd-configfs", version)]
struct Cli {
    /// The daemon's admin socket. Root's default is /run/riserd/admin.sock.
    #[arg(long, value_name = "PATH", env = "RISERD_SOCKET")]
    socket: Option<PathBuf>,
    /// A directory, such as /sys/kernel/config.
    mountpoint: PathBuf,
}

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), Box<dyn std::error::Error>> {
    let socket = cli.socket.or_else(socket::default_path);
    let socket = socket.ok_or("no default admin socket for this user; name one with --socket")?;
    let riserd = Riserd::new(socket.clone());
    let mut secret = [0; 16];
    getrandom::fill(&mut secret)?;
    let secret = secret.iter().map(|b| format!("{b:02x}")).collect();
    let host = Host::new(move || daemon::sessions(&socket));
    let engine = Engine::new(secret, Box::new(host), Box::new(riserd))?;
    let mount = Mount::new(Arc::new(Mutex::new(engine)), &cli.mountpoint)?;
    tracing::info!(mountpoint = %cli.mountpoint.display(), "mounted");
    mount.wait()?;
    Ok(())
}
