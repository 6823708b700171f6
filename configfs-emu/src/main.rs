//! `riserd-configfs`: a running `riserd` as LIO's configfs tree, and its configuration as LIO's
//! file.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use clap::{Parser, Subcommand};
use riser_admin_api::socket;
use riser_config::Config;
use riser_configfs_emu::convert;
use riser_configfs_emu::daemon::{AdminSocket, Riserd};
use riser_configfs_emu::engine::{Daemon, Engine};
use riser_configfs_emu::fuse::Mount;
use riser_configfs_emu::host::{Host, OtherHost};
use riser_configfs_emu::saved;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::EnvFilter;

/// The exit code where something has no words on the other side.
const INCOMPLETE: u8 = 3;

/// Shows a running riserd as LIO's configfs tree, for targetcli, rtslib and scripts, until it is
/// unmounted; SIGTERM and SIGINT unmount it. Says on standard error what is not shown, refused, or
/// without effect.
#[derive(Debug, Parser)]
#[command(name = "riserd-configfs", version)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Cli {
    /// The daemon's admin socket. Root's default is /run/riserd/admin.sock.
    #[arg(long, value_name = "PATH", env = "RISERD_SOCKET")]
    socket: Option<PathBuf>,
    /// A directory, such as /sys/kernel/config.
    #[arg(required = true)]
    mountpoint: Option<PathBuf>,
    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Print what a file of targetcli's saveconfig says as a configuration of riserd. What cannot
    /// be said is left out and named on standard error; the exit code is 3 then.
    Import {
        /// The file, such as /etc/target/saveconfig.json.
        file: PathBuf,
    },
    /// Print a configuration of riserd as targetcli's saveconfig writes it, for targetctl restore.
    /// What cannot be said is left out and named on standard error; the exit code is 3 then.
    Export {
        /// A configuration file; by default what the running riserd serves.
        file: Option<PathBuf>,
        /// The daemon's admin socket. Root's default is /run/riserd/admin.sock.
        #[arg(long, value_name = "PATH", env = "RISERD_SOCKET")]
        socket: Option<PathBuf>,
    },
}

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    let cli = Cli::parse();
    let done = match cli.verb {
        None => mount(cli.socket, cli.mountpoint).map(|()| Vec::new()),
        Some(Verb::Import { file }) => import(&file),
        Some(Verb::Export { file, socket }) => export(file, socket),
    };
    match done {
        Ok(lost) if lost.is_empty() => ExitCode::SUCCESS,
        Ok(lost) => {
            for what in lost {
                tracing::warn!("not converted: {what}");
            }
            ExitCode::from(INCOMPLETE)
        }
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn riserd(socket: Option<PathBuf>) -> Result<(PathBuf, Riserd), Failure> {
    let socket = socket.or_else(socket::default_path);
    let socket = socket.ok_or("no default admin socket for this user; name one with --socket")?;
    Ok((socket.clone(), Riserd::new(socket)))
}

/// A random secret.
fn secret() -> Result<String, Failure> {
    let mut secret = [0; 16];
    getrandom::fill(&mut secret)?;
    Ok(secret.iter().map(|b| format!("{b:02x}")).collect())
}

fn mount(socket: Option<PathBuf>, mountpoint: Option<PathBuf>) -> Result<(), Failure> {
    let mountpoint = mountpoint.ok_or("no directory")?;
    let (socket, riserd) = riserd(socket)?;
    let host = Host::new(AdminSocket(socket));
    let engine = Engine::new(secret()?, Box::new(host), Box::new(riserd))?;
    // Before it is mounted: a signal must not leave a mount without a server.
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let mount = Mount::new(Arc::new(Mutex::new(engine)), &mountpoint)?;
    tracing::info!(mountpoint = %mountpoint.display(), "mounted");
    mount.serve(move || {
        signals.forever().next();
    })?;
    tracing::info!(mountpoint = %mountpoint.display(), "unmounted");
    Ok(())
}

fn print(text: &str) -> Result<(), Failure> {
    Ok(writeln!(io::stdout().lock(), "{}", text.trim_end())?)
}

fn read(file: &Path) -> Result<String, Failure> {
    Ok(fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?)
}

fn import(file: &Path) -> Result<Vec<String>, Failure> {
    let document = serde_json::from_str(&read(file)?);
    let document = document.map_err(|e| format!("{}: {e}", file.display()))?;
    let world = OtherHost::default();
    let restored = saved::restore(&document, &world);
    let (config, lost) = saved::configuration(restored, &secret()?, &world);
    print(&config.to_yaml())?;
    Ok(lost)
}

fn export(file: Option<PathBuf>, socket: Option<PathBuf>) -> Result<Vec<String>, Failure> {
    let document = match file {
        Some(file) => {
            let config = Config::parse(&read(&file)?, &file.display().to_string())?;
            config.to_value()
        }
        None => riserd(socket)?.1.document()?,
    };
    let world = OtherHost::default();
    let imported = convert::import(&document, secret()?, &world);
    let mut saved = saved::save(&imported.tree, &world);
    // rtslib sorts the keys, too.
    saved.document.sort_all_objects();
    print(&serde_json::to_string_pretty(&saved.document)?)?;
    Ok(imported.hidden.into_iter().chain(saved.omitted).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_call_it_as_it_is() {
        let commands = riser_docs::commands_of(&["riserd-configfs"]);
        let whole = commands.into_iter().filter(|command| !command.is_prose);
        let mut count = 0;
        for command in whole {
            let why = Cli::try_parse_from(&command.words)
                .err()
                .map(|e| e.to_string());
            assert_eq!(why, None, "{}: {:?}", command.place, command.words);
            count += 1;
        }
        assert!(count >= 3, "only {count} were found");
    }
}
