//! `riserd-configfs`: mounts a running `riserd` as a LIO configfs tree, and converts its
//! configuration from and to the format used by LIO.

mod manual;

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use riser_admin_api::socket;
use riser_config::Config;
use riser_configfs_emu::convert;
use riser_configfs_emu::daemon::{AdminSocket, Riserd};
use riser_configfs_emu::engine::{Daemon, Engine};
use riser_configfs_emu::fuse::Mount;
use riser_configfs_emu::host::{Host, OtherHost};
use riser_configfs_emu::saved;
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::EnvFilter;

/// Exit code if some of the served parts are missing.
const INCOMPLETE: u8 = 3;

/// Exit code if all served parts are included, but some settings have no effect.
const NOTED: u8 = 4;

/// Result of a command. Used to print messages and set the exit code.
#[derive(Debug, Default)]
struct Summary {
    /// Parts that are not supported by the other side.
    lost: Vec<String>,
    /// Notes about parts that are not served or have no effect.
    notes: Vec<String>,
}

impl Summary {
    fn exit_status(&self) -> u8 {
        match (self.lost.is_empty(), self.notes.is_empty()) {
            (false, _) => INCOMPLETE,
            (true, false) => NOTED,
            (true, true) => 0,
        }
    }
}

/// Mount the configuration of a running riserd as a LIO configfs tree, for targetcli, rtslib and
/// scripts
///
/// The tree is served until it is unmounted, or until SIGTERM or SIGINT. Settings that are
/// rejected, have no effect or cannot be represented in the tree are reported on standard error.
#[derive(Debug, Parser)]
#[command(name = "riserd-configfs", version, after_help = manual::MOUNT)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Cli {
    /// Use this admin socket of the daemon [default for root: /run/riserd/admin.sock].
    #[arg(long, value_name = "PATH", env = "RISERD_SOCKET")]
    socket: Option<PathBuf>,
    /// Mount point, such as /sys/kernel/config.
    #[arg(required = true)]
    mountpoint: Option<PathBuf>,
    #[command(subcommand)]
    verb: Option<Verb>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Convert a targetcli saveconfig file to a riserd configuration, and print it
    ///
    /// Objects that riserd cannot serve are omitted, and reported on standard error with the
    /// reason. Notes report settings without an effect, and objects that LIO does not serve either,
    /// such as disabled targets.
    #[command(after_help = manual::IMPORT)]
    Import {
        /// File to convert, such as /etc/target/saveconfig.json.
        file: PathBuf,
    },
    /// Print a riserd configuration as a targetcli saveconfig file, for `targetctl restore`
    ///
    /// Objects that LIO does not support are omitted, and reported on standard error.
    #[command(after_help = manual::EXPORT)]
    Export {
        /// Configuration file [default: the configuration of the running riserd].
        file: Option<PathBuf>,
        /// Use this admin socket of the daemon [default for root: /run/riserd/admin.sock].
        #[arg(long, value_name = "PATH", env = "RISERD_SOCKET")]
        socket: Option<PathBuf>,
    },
    /// Print the completion script for a shell.
    #[command(hide = true)]
    Completions {
        /// Shell for the script.
        shell: Shell,
    },
    /// Print the manual page, or write all manual pages to a directory.
    #[command(hide = true)]
    Man {
        /// Write all manual pages to this directory.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        // The subscriber prints its own errors to standard error and will panic if this also fails.
        .log_internal_errors(false)
        .init();
    let cli = Cli::parse();
    let done = match cli.verb {
        None => mount(cli.socket, cli.mountpoint).map(|()| Summary::default()),
        Some(Verb::Import { file }) => import(&file),
        Some(Verb::Export { file, socket }) => export(file, socket),
        Some(Verb::Completions { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "riserd-configfs", &mut script);
            let written = io::stdout().write_all(&script);
            written.map(|()| Summary::default()).map_err(Into::into)
        }
        Some(Verb::Man { dir }) => {
            let written = manual::write(Cli::command(), dir.as_deref());
            written.map(|()| Summary::default()).map_err(Into::into)
        }
    };
    match done {
        Ok(summary) => {
            for note in &summary.notes {
                tracing::info!("note: {note}");
            }
            for what in &summary.lost {
                tracing::warn!("not converted: {what}");
            }
            ExitCode::from(summary.exit_status())
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

/// Returns a random secret.
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
    // Set up the handlers before we mount the tree, because a signal must never leave a mount
    // without a server.
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let mount = Mount::new(Arc::new(Mutex::new(engine)), &mountpoint);
    let mount = mount.map_err(|e| format!("cannot mount at {}: {e}", mountpoint.display()))?;
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

fn import(file: &Path) -> Result<Summary, Failure> {
    let document = serde_json::from_str(&read(file)?);
    let document: Value = document.map_err(|e| format!("{}: {e}", file.display()))?;
    let (config, summary) = converted(&document)?;
    print(&config.to_yaml())?;
    Ok(summary)
}

/// Converts a saveconfig document.
fn converted(document: &Value) -> Result<(Config, Summary), Failure> {
    // targetcli writes both lists even if they are empty.
    let lists = ["storage_objects", "targets"];
    if lists.iter().all(|list| document.get(list).is_none()) {
        return Err("missing storage_objects and targets: this is not a saveconfig file".into());
    }
    let world = OtherHost::default();
    let restored = saved::restore(document, &world);
    let imported = saved::configuration(restored, &secret()?, &world);
    let summary = Summary {
        lost: imported.lost,
        notes: imported.notes,
    };
    Ok((imported.config, summary))
}

fn export(file: Option<PathBuf>, socket: Option<PathBuf>) -> Result<Summary, Failure> {
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
    // rtslib also sorts the keys.
    saved.document.sort_all_objects();
    print(&serde_json::to_string_pretty(&saved.document)?)?;
    Ok(Summary {
        lost: imported.hidden.into_iter().chain(saved.omitted).collect(),
        notes: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_status_distinguishes_losses_from_notes() {
        let status = |document: &Value| converted(document).unwrap().1.exit_status();
        let mut document: Value =
            serde_json::from_str(include_str!("../tests/data/lio/minimal.json")).unwrap();
        assert_eq!(status(&document), 0);
        document["targets"][0]["tpgs"][0]["enable"] = false.into();
        assert_eq!(status(&document), NOTED);
        document["storage_objects"][0]["plugin"] = "pscsi".into();
        assert_eq!(status(&document), INCOMPLETE);
    }

    #[test]
    fn unrelated_document_is_rejected() {
        let error = converted(&serde_json::json!({ "x": 1 })).err().unwrap();
        assert!(error.to_string().starts_with("missing storage_objects"));
    }

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
