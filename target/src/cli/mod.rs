//! The command line of `riserd`.
//!
//! # Exit codes
//! - 0: success.
//! - 1: runtime error: a backend cannot be opened, an address is in use, or there is no `io_uring`.
//!   Also if `check --open` has found a resource that cannot be opened.
//! - 2: invalid usage or configuration.
//! - 3: `diff` has found differences.
//!
//! The library returns errors as values. They are only formatted for users here.
//!
//! # Modules
//! - `request`: requests to a running daemon. `verbs`: commands that show and change its objects by
//!   path. `trace`: traces commands. `serve`: the configuration of `run --serve`.
//! - `completion`: shell completion scripts. `manual`: manual pages. [`mod@reference`]: the keys of
//!   a configuration file, for a manual page and the book.
//! - `convert`: imports and exports disks.
//! - `check`: configuration files. `probe`: checks whether resources can be opened. `devices`:
//!   addresses and devices for portals.

mod check;
mod completion;
mod convert;
mod devices;
mod examples;
mod image;
mod manual;
mod probe;
pub mod reference;
mod request;
mod serve;
mod trace;
mod verbs;

use std::error::Error;
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use hyper::Method;
use riser_admin_api::client::{self, ApiRequest};
use riser_admin_api::view::{BlockedView, Changes, HistoryView, ScrubView, SessionView};
use serde_json::json;

use self::check::{Described, checked, load};
use self::request::{ClientOptions, Output, interval, run_request, show};
use self::trace::Trace;
use self::verbs::Verb;
use crate::config::{Config, ConfigError, schema};
use crate::control::upgrade::Handover;
use crate::control::{Source, report};

/// Exit code for a runtime error.
const FAILURE: u8 = 1;

/// Exit code for invalid usage or configuration.
const MISTAKE: u8 = 2;

/// Exit code of `diff` if there are differences.
const DIFFERENT: u8 = 3;

/// Serve files and block devices as SCSI disks over RDMA (SRP, iSER) and TCP (iSCSI).
#[derive(Debug, Parser)]
#[command(name = "riserd", version, after_help = EXIT_CODES)]
struct Cli {
    /// Select the format of results and errors.
    #[arg(long, short, global = true, value_enum, default_value_t)]
    output: Output,
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 success, 1 runtime failure, 2 invalid usage or \
                          configuration, 3 `diff` found differences.";

/// The same for manual pages.
const EXIT_STATUS: [(&str, &str); 4] = [
    ("0", "Success."),
    ("1", "Runtime failure."),
    ("2", "Invalid usage or configuration."),
    ("3", "`diff` found differences."),
];

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a configuration until SIGTERM or SIGINT
    ///
    /// SIGHUP reloads the file. Logs are written to standard error; RUST_LOG overrides the log
    /// filter of the file.
    Run {
        /// Path of the configuration file.
        #[arg(long, short, value_name = "FILE", required_unless_present = "serve")]
        config: Option<PathBuf>,
        /// Serve this file or block device without a configuration file
        ///
        /// All initiators that can reach the addresses of --listen can read and write the disk,
        /// including all local users. `create` creates the file, and requires `size`. Repeat this
        /// option to serve further disks as LUN 1, 2, and so on. A path that contains a comma
        /// requires a configuration file.
        #[arg(
            long,
            value_name = "PATH[,size=SIZE][,create][,read_only]",
            conflicts_with_all = ["config", "restore"]
        )]
        serve: Vec<serve::Disk>,
        /// Listen on this address with the iSCSI, iSER and SRP portals of --serve; can be repeated.
        #[arg(
            long,
            value_name = "ADDRESS",
            default_value = "127.0.0.1",
            requires = "serve"
        )]
        listen: Vec<IpAddr>,
        /// Restore the last applied configuration from the state directory
        ///
        /// The file is only used if it was changed after it was last read, or if no configuration
        /// was applied.
        #[arg(long)]
        restore: bool,
    },
    /// Check a configuration file, and with --open also whether its resources can be opened.
    Check {
        /// Path of the configuration file.
        file: PathBuf,
        /// Also open backends, read secrets and bind portal addresses temporarily
        ///
        /// This does not change anything. Resources of a running daemon are reported as in use.
        #[arg(long)]
        open: bool,
        /// Select the format of the result.
        #[arg(long, short, value_enum, default_value_t)]
        output: Output,
    },
    /// List the connections of sessions, with initiators, addresses and login parameters.
    Sessions(ClientOptions),
    /// List the targets, with portals and logical units.
    Targets(ClientOptions),
    /// Show the status of the running daemon.
    Status(ClientOptions),
    /// Reload the configuration file and show the changes; unsaved changes are reverted.
    Reload(ClientOptions),
    /// Apply a configuration file as a single change, and show the differences.
    Apply {
        /// Path of the configuration file.
        file: PathBuf,
        /// Apply the configuration even if backends, portals or the metrics address are not
        /// available
        ///
        /// These are retried, and shown as NOT SERVED by `riserd status`.
        #[arg(long)]
        allow_unavailable: bool,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Show the differences that `apply` would make, without applying them.
    Diff {
        /// Path of the configuration file.
        file: PathBuf,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Save the current configuration, including secrets, as YAML or JSON.
    Save {
        /// File to write [default: standard output].
        file: Option<PathBuf>,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Restore a previous configuration and show the changes
    ///
    /// This is a normal change, which can be rolled back as well.
    Rollback {
        /// Number of configurations to go back.
        #[arg(default_value_t = 1)]
        back: usize,
        /// Apply the configuration even if backends, portals or the metrics address are not
        /// available
        ///
        /// These are retried, and shown as NOT SERVED by `riserd status`.
        #[arg(long)]
        allow_unavailable: bool,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Replace the running daemon with another binary, usually after an update
    ///
    /// The process, pending connections, reservations and RAM disks are kept, and initiators log in
    /// again. If the binary does not support the current configuration, the daemon continues
    /// unchanged.
    Upgrade {
        /// Execute this binary; only for root and the user of the daemon [default: the original
        /// path of the daemon].
        #[arg(long, value_name = "PATH")]
        binary: Option<PathBuf>,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// List the previous configurations.
    History(ClientOptions),
    /// Update the sizes of backends after a file or device was resized.
    Rescan(ClientOptions),
    /// Clear a recorded flush failure, so that flushes can succeed again
    ///
    /// Acknowledged writes may be lost: check or restore the data on the unit first.
    ClearFlushFailure {
        /// Serial number of the unit [default: all units].
        serial: Option<String>,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Verify the protection information of all blocks on a backend
    ///
    /// The scrub runs in the daemon until all blocks were read, and is stopped by a restart or an
    /// upgrade. Without a backend, the last scrub of each backend is shown.
    Scrub {
        /// Name of the backend.
        backend: Option<String>,
        /// Read at most this number of bytes in a second, such as 200MiB; 0 for no limit [default:
        /// 64MiB].
        #[arg(long, value_name = "SIZE", requires = "backend", value_parser = scrub_rate)]
        rate: Option<u64>,
        /// Stop the scrub.
        #[arg(long, requires = "backend", conflicts_with = "rate")]
        stop: bool,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Import a disk with protection information from LIO
    ///
    /// Creates a file for a backend with `protection` from the image of a `fileio` backstore and the
    /// protection information that LIO stores in IMAGE.protection. All blocks are verified. Stop LIO
    /// first. The files of LIO do not change.
    ImportDisk(convert::Import),
    /// Export a disk with protection information to LIO
    ///
    /// Creates the image of a `fileio` backstore, and IMAGE.protection. All blocks are verified. The
    /// disk must not be served for writing.
    ExportDisk(convert::Export),
    /// Disconnect an initiator
    ///
    /// It can log in again immediately unless it is blocked.
    Disconnect {
        /// iSCSI name, initiator port or session number
        ///
        /// `riserd sessions` shows names and ports. The session number is `nexus` in `riserd
        /// sessions -o json` and in the audit log.
        #[arg(value_name = "INITIATOR|SESSION")]
        session: String,
        /// Block logins from all ports of the initiator to all targets.
        #[arg(long)]
        block: bool,
        /// Unblock the initiator after this time, such as 10m or 2h [default: never].
        #[arg(long = "for", value_name = "TIME", requires = "block", value_parser = block_time)]
        duration: Option<Duration>,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Allow a blocked initiator to log in again.
    Unblock {
        /// Initiator, as shown by `riserd status`.
        initiator: String,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Show live rates and latencies by logical unit and session
    ///
    /// With JSON output, a document is printed per interval.
    Top {
        /// Update at this interval, in seconds.
        #[arg(long, short, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
        interval: f64,
        /// Show a single interval and exit.
        #[arg(long)]
        once: bool,
        #[command(flatten)]
        options: ClientOptions,
    },
    /// Trace individual commands, with the time of each processing stage.
    Trace(Trace),
    #[command(flatten)]
    Verb(Verb),
    /// Print the JSON Schema of the configuration file, for editors.
    Schema,
    /// Print a shell completion script.
    Completions {
        /// Shell for the script.
        shell: Shell,
    },
    /// Print a manual page, or write all pages to a directory.
    Man {
        /// Page to print.
        #[arg(value_enum, default_value_t, conflicts_with = "dir")]
        page: manual::Page,
        /// Write the pages of the configuration file and of all commands to this directory.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// List addresses and RDMA devices for portals.
    Devices {
        /// Select the format of the list.
        #[arg(long, short, value_enum, default_value_t)]
        output: Output,
    },
}

/// Error returned by `run`.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Returns the command line, which is used to check documents.
#[must_use]
pub fn command() -> clap::Command {
    examples::add(Cli::command())
}

/// Parses the arguments of this process and executes the command. `run` serves a configuration.
pub fn main(run: impl FnOnce(Source<'_>) -> Result<(), BoxError>) -> ExitCode {
    let matches = command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let output = cli.output;
    match dispatch(cli.command, run, &mut io::stdout().lock()) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            // If standard error is closed, we cannot report this.
            let _ = writeln!(io::stderr(), "{}", failure.print(output));
            ExitCode::from(failure.code)
        }
    }
}

/// A failed command.
#[derive(Debug)]
struct Failure {
    text: String,
    code: u8,
    /// The error in a configuration file, if any.
    mistake: Option<Box<ConfigError>>,
}

impl Failure {
    fn run_time(text: impl std::fmt::Display) -> Self {
        Self {
            text: format!("riserd: {text}"),
            code: FAILURE,
            mistake: None,
        }
    }

    fn mistake(text: impl std::fmt::Display) -> Self {
        Self {
            code: MISTAKE,
            ..Self::run_time(text)
        }
    }

    /// Formats this for users, or as JSON in the same format as `riser`.
    fn print(&self, output: Output) -> String {
        if output == Output::Text {
            return self.text.clone();
        }
        let text = self.text.strip_prefix("riserd: ").unwrap_or(&self.text);
        let mut error = json!({ "message": text, "exit_status": self.code });
        if let Some(mistake) = &self.mistake {
            error["message"] = json!(mistake.message);
            error["file"] = json!(mistake.file);
            error["line"] = json!(mistake.line);
            error["column"] = json!(mistake.column);
            error["path"] = json!(mistake.path);
            if let Some(hint) = &mistake.hint {
                error["help"] = json!(hint);
            }
        }
        json!({ "error": error }).to_string()
    }
}

/// Parses the rate of a scrub, in bytes per second.
fn scrub_rate(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        size => riser_units::parse_size(size),
    }
}

/// Executes a command and returns the exit code.
fn dispatch(
    command: Command,
    run: impl FnOnce(Source<'_>) -> Result<(), BoxError>,
    out: &mut dyn Write,
) -> Result<u8, Failure> {
    let get = |path| ApiRequest::new(Method::GET, path);
    let post = |path| ApiRequest::new(Method::POST, path);
    let done = match command {
        Command::Run {
            config: Some(file),
            restore,
            ..
        } => run_with(Some(file.clone()), &|| load(&file), restore, run),
        Command::Run { serve, listen, .. } => {
            let text = serve::document(&serve, &listen).map_err(Failure::mistake)?;
            let parse = || check::parse(text.clone(), serve::ORIGIN).map(|(config, _)| config);
            run_with(None, &parse, false, run)
        }
        Command::Check { file, open, output } => {
            let config = load(&file)?;
            let described = Described::new(&config, open);
            show(out, output, &described, Described::text)?;
            return Ok(if described.is_served() { 0 } else { FAILURE });
        }
        Command::Sessions(options) => {
            run_request(out, &options, get("/v1/sessions"), report::sessions)
        }
        Command::Targets(options) => {
            run_request(out, &options, get("/v1/targets"), report::targets)
        }
        Command::Status(options) => run_request(out, &options, get("/v1/status"), report::status),
        Command::Reload(options) => run_request(out, &options, post("/v1/reload"), report::changes),
        Command::ClearFlushFailure { serial, options } => {
            let question = post("/v1/clear-flush-failure").with(serial.unwrap_or_default());
            run_request(out, &options, question, report::targets)
        }
        Command::Scrub {
            backend,
            rate,
            stop,
            options,
        } => {
            let Some(backend) = backend else {
                let describe = |list: &Vec<ScrubView>| report::scrubs(list);
                let question = get("/v1/scrubs");
                return run_request(out, &options, question, describe).map(|()| 0);
            };
            let path = match (stop, rate) {
                (true, _) => "/v1/stop-scrub".to_owned(),
                (false, None) => "/v1/scrub".to_owned(),
                (false, Some(rate)) => format!("/v1/scrub?rate={rate}"),
            };
            let question = ApiRequest::new(Method::POST, path).with(backend);
            run_request(out, &options, question, report::scrub)
        }
        Command::Disconnect {
            session,
            block,
            duration,
            options,
        } => {
            let seconds = duration.map(|time| format!("&seconds={}", time.as_secs()));
            let seconds = seconds.unwrap_or_default();
            let path = format!("/v1/disconnect?block={block}{seconds}");
            let question = ApiRequest::new(Method::POST, path).with(session);
            let describe =
                |sessions: &Vec<SessionView>| report::disconnected(sessions, block, duration);
            run_request(out, &options, question, describe)
        }
        Command::Unblock { initiator, options } => {
            let question = post("/v1/unblock").with(initiator);
            let describe = |list: &Vec<BlockedView>| report::blocklist(list);
            run_request(out, &options, question, describe)
        }
        Command::ImportDisk(import) => import.run(out),
        Command::ExportDisk(export) => export.run(out),
        Command::Rescan(options) => run_request(out, &options, post("/v1/rescan"), report::targets),
        Command::History(options) => {
            let describe = |entries: &Vec<HistoryView>| report::history(entries);
            run_request(out, &options, get("/v1/history"), describe)
        }
        Command::Apply {
            file,
            allow_unavailable,
            options,
        } => {
            let put = verbs::put_config("apply", allow_unavailable).with(checked(&file)?);
            run_request(out, &options, put, report::changes)
        }
        Command::Rollback {
            back,
            allow_unavailable,
            options,
        } => {
            let target = format!("/v1/rollback?allow_unavailable={allow_unavailable}");
            let question = ApiRequest::new(Method::POST, target).with(back.to_string());
            run_request(out, &options, question, report::changes)
        }
        Command::Upgrade { binary, options } => request::upgrade(out, binary.as_deref(), &options),
        Command::Diff { file, options } => {
            let question = post("/v1/diff").with(checked(&file)?);
            let response: Changes = client::call(&options.socket()?, question)?;
            show(out, options.output, &response, report::changes)?;
            // Use a separate exit code, so that scripts can distinguish a difference from an error.
            let is_same = response.changes.is_empty() && response.written.drift.is_empty();
            return Ok(if is_same { 0 } else { DIFFERENT });
        }
        Command::Save { file, options } => request::save(out, file.as_deref(), &options),
        Command::Top {
            interval,
            once,
            options,
        } => request::show_top(out, interval, once, &options),
        Command::Trace(wanted) => trace::run(out, &wanted),
        Command::Verb(verb) => verbs::run(out, verb),
        Command::Schema => {
            let schema = serde_json::to_string_pretty(&schema()).map_err(Failure::run_time)?;
            print(out, &schema)
        }
        Command::Completions { shell } => print_completions(out, shell),
        Command::Man { dir: Some(dir), .. } => manual::write_all(&dir)
            .map_err(|e| Failure::run_time(format!("{}: {e}", dir.display()))),
        Command::Man { dir: None, page } => {
            let text = manual::render(page).map_err(Failure::run_time)?;
            write(out, &text)
        }
        Command::Devices { output } => {
            let text = devices::devices(output).map_err(Failure::run_time)?;
            print(out, &text)
        }
    };
    done.map(|()| 0)
}

/// Parses the duration of a block in seconds, minutes, hours or days.
fn block_time(text: &str) -> Result<Duration, String> {
    let end = text
        .trim_end_matches(|c: char| c.is_ascii_alphabetic())
        .len();
    let (number, unit) = text.split_at(end);
    let unit = match unit {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err("expected a number with s, m, h or d".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| "invalid number".to_owned())?;
    match number.checked_mul(unit) {
        Some(0) | None => Err("out of range".to_owned()),
        Some(seconds) => Ok(Duration::from_secs(seconds)),
    }
}

/// Serves the configuration that `load` returns, or that of the previous program.
fn run_with(
    file: Option<PathBuf>,
    load: &dyn Fn() -> Result<Config, Failure>,
    restore: bool,
    run: impl FnOnce(Source<'_>) -> Result<(), BoxError>,
) -> Result<(), Failure> {
    // Check for handover state first: if there is any, we don't need the file, which may be invalid
    // or missing. The log is started after that, because its filter is part of the configuration.
    let handover = Handover::from_env();
    let config = match handover.config() {
        Some(config) => config.clone(),
        None => load()?,
    };
    crate::control::logging::start(&config.log);
    if let Some(why) = handover.broken() {
        tracing::error!(
            why,
            "cannot use the handover state of the previous program; starting without it"
        );
    }
    let reread = &|| load().map_err(|failure| failure.text);
    let source = Source {
        config,
        file,
        reread,
        restore,
        handover,
    };
    run(source).map_err(|e| Failure::run_time(chain(&*e)))
}

fn print_completions(out: &mut dyn Write, shell: Shell) -> Result<(), Failure> {
    write(out, &completion::script(shell, &mut Cli::command()))
}

fn print(out: &mut dyn Write, text: &str) -> Result<(), Failure> {
    write(out, format!("{text}\n").as_bytes())
}

fn write(out: &mut dyn Write, bytes: &[u8]) -> Result<(), Failure> {
    match out.write_all(bytes) {
        // The reader has exited, for example `head`.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(Failure::run_time),
    }
}

/// Formats an error with its causes on a single line.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use clap::CommandFactory;
    use riser_transport::shm::ShmListener;

    const MINIMAL: &str = include_str!("../../../deploy/examples/minimal.yaml");

    /// Runs a command line with this configuration. Returns the exit code and the output.
    fn riserd(text: &str, args: &[&str]) -> (u8, String) {
        let dir = std::env::temp_dir().join(format!(
            "riserd-cli-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("riserd.yaml");
        std::fs::write(&file, text).unwrap();
        let args = args.iter().map(|a| match *a {
            "FILE" => file.to_str().unwrap().to_owned(),
            a => a.to_owned(),
        });
        let cli = Cli::try_parse_from(std::iter::once("riserd".to_owned()).chain(args)).unwrap();
        let mut out = Vec::new();
        let result = dispatch(
            cli.command,
            |source| match source.config.targets[0].name.as_str() {
                "demo" => Ok(()),
                other => Err(format!("cannot serve {other}").into()),
            },
            &mut out,
        );
        std::fs::remove_dir_all(&dir).unwrap();
        match result {
            Ok(code) => (code, String::from_utf8(out).unwrap()),
            Err(failure) => (failure.code, failure.text),
        }
    }

    #[test]
    fn command_line_is_well_formed() {
        Cli::command().debug_assert();
        assert!(Cli::try_parse_from(["riserd", "run"]).is_err());
    }

    #[test]
    fn check_describes_targets() {
        let (code, text) = riserd(MINIMAL, &["check", "FILE"]);
        assert_eq!(code, 0);
        assert!(
            text.starts_with("valid: 1 backend(s), 1 target(s)\ntarget demo\n"),
            "{text}"
        );
        assert!(text.contains("  lun 0: disk0, serial "), "{text}");
        assert!(text.contains("  access: open to all initiators"), "{text}");
        let (code, text) = riserd(MINIMAL, &["check", "-o", "json", "FILE"]);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(code, 0);
        assert_eq!(value["targets"][0]["luns"][0]["backend"], "disk0");
        assert_eq!(
            value["targets"][0]["portals"][0]["listen"],
            "127.0.0.1:5555"
        );
    }

    #[test]
    fn configuration_errors_show_line_and_exit_2() {
        let text = MINIMAL.replace("kind: file", "kind: fiel");
        let (code, said) = riserd(&text, &["check", "FILE"]);
        assert_eq!(code, 2);
        let first = said.lines().next().unwrap();
        assert!(
            first.ends_with(
                "riserd.yaml:3:18: backends.disk0.kind: `fiel` is not one of file, device, ram, \
                 null (did you mean `file`?)"
            ),
            "{first}"
        );
        assert!(said.contains("disk0: { kind: fiel"), "{said}");
        assert_eq!(said.matches("is not one of").count(), 1, "{said}");
        assert_eq!(said.matches("did you mean").count(), 1, "{said}");
        let cli = Cli::try_parse_from(["riserd", "-o", "json", "check", "x"]).unwrap();
        assert_eq!(cli.output, Output::Json);
        let (code, said) = riserd("", &["run", "--config", "/nonexistent/riserd.yaml"]);
        assert_eq!(code, 2);
        assert!(
            said.contains("/nonexistent/riserd.yaml: cannot read the file"),
            "{said}"
        );
    }

    #[test]
    fn configuration_error_can_be_json() {
        let text = MINIMAL.replace("kind: file", "kind: fiel");
        let error = Config::parse(&text, "riserd.yaml").unwrap_err();
        let failure = Failure {
            text: "for people".to_owned(),
            code: MISTAKE,
            mistake: Some(Box::new(error)),
        };
        let document: serde_json::Value =
            serde_json::from_str(&failure.print(Output::Json)).unwrap();
        let expected = json!({ "error": {
            "message": "`fiel` is not one of file, device, ram, null",
            "help": "did you mean `file`?",
            "exit_status": 2,
            "file": "riserd.yaml",
            "line": 3,
            "column": 18,
            "path": "backends.disk0.kind",
        }});
        assert_eq!(document, expected);
        assert_eq!(failure.print(Output::Text), "for people");
        let other: serde_json::Value =
            serde_json::from_str(&Failure::run_time("no").print(Output::Json)).unwrap();
        assert_eq!(
            other,
            json!({ "error": { "message": "no", "exit_status": 1 } })
        );
    }

    #[test]
    fn output_option_works_in_any_position() {
        for (words, form) in [
            (&["riserd", "status"] as &[&str], Output::Text),
            (&["riserd", "-o", "human", "status"], Output::Text),
            (&["riserd", "status", "-o", "text"], Output::Text),
            (&["riserd", "-o", "json", "status"], Output::Json),
            (&["riserd", "status", "--output", "json"], Output::Json),
        ] {
            let cli = Cli::try_parse_from(words).unwrap();
            let Command::Status(options) = &cli.command else {
                panic!("{words:?}");
            };
            assert_eq!((cli.output, options.output), (form, form), "{words:?}");
        }
    }

    #[test]
    fn check_open_changes_nothing() {
        let dir = std::env::temp_dir().join(format!("riserd-check-open-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = |name: &str| dir.join(name).display().to_string();
        std::fs::write(file("odd.img"), [0; 1000]).unwrap();
        std::fs::write(file("vm.qcow2"), b"QFI\xfb\0\0\0\x03".repeat(512)).unwrap();
        let text = format!(
            "backends:\n  new: {{ kind: file, path: {}, size: 1MiB, create: true }}\n  \
             odd: {{ kind: file, path: {} }}\n  lost: {{ kind: file, path: {}, size: 1MiB, create: true }}\n  \
             vm: {{ kind: file, path: {} }}\ntargets:\n  - name: t\n    iqn: iqn.2026-01.a:t\n    portals:\n      \
             - {{ protocol: iscsi, listen: 127.0.0.1:39261 }}\n      \
             - {{ protocol: iscsi, listen: 192.0.2.77 }}\n    luns: {{ 0: new, 1: odd, 2: lost }}\n    \
             access: open\nstate: {{ directory: none }}\n",
            file("new.img"),
            file("odd.img"),
            file("missing/lost.img"),
            file("vm.qcow2"),
        );
        let (code, said) = riserd(&text, &["check", "FILE"]);
        assert_eq!(code, 0, "{said}");
        let (code, said) = riserd(&text, &["check", "--open", "FILE"]);
        assert_eq!(code, FAILURE, "{said}");
        for part in [
            "backend new: 1.0 MiB",
            "backend odd: 512 B",
            "note: backend odd: 1000 bytes are not",
            "note: backend vm: disk image (QCOW), which would be served as a raw disk",
            "NOT SERVED: backend lost: ",
            "mkdir -p",
            "NOT SERVED: portal 192.0.2.77:3260: Cannot assign requested address",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(!said.contains("39261: "), "{said}");
        assert!(!dir.join("new.img").exists(), "what was created is gone");
        let (_, said) = riserd(&text, &["check", "--open", "-o", "json", "FILE"]);
        let document: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!(document["problems"].as_array().unwrap().len(), 2);
        assert_eq!(document["backends"][0]["size"], 1 << 20);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn check_reports_missing_known_file() {
        let dir = std::env::temp_dir().join(format!("riserd-check-gone-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let image = dir.join("disk.img");
        let text = format!(
            "backends:\n  disk: {{ kind: file, path: {}, size: 1MiB, create: true }}\n\
             targets: []\nstate: {{ directory: {} }}\n",
            image.display(),
            dir.display(),
        );
        let (code, said) = riserd(&text, &["check", "--open", "FILE"]);
        assert_eq!(code, 0, "{said}");
        // This is written by a daemon after it has used the file.
        let names = serde_json::json!({ "version": 1, "backends": { "disk": {
            "serial": "00", "path": image, "file": { "device": 1, "inode": 1 },
        } } });
        std::fs::write(dir.join("identities.json"), names.to_string()).unwrap();
        let (code, said) = riserd(&text, &["check", "--open", "FILE"]);
        assert_eq!(code, FAILURE, "{said}");
        assert!(said.contains("it existed before"), "{said}");
        std::fs::write(&image, "").unwrap();
        let (code, said) = riserd(&text, &["check", "--open", "FILE"]);
        assert_eq!(code, 0, "{said}");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn check_reports_owner_of_shared_memory() {
        let _taken = ShmListener::bind([127, 4, 0, 1].into()).unwrap();
        let process = format!("process {} of user", std::process::id());
        for (transport, part) in [
            ("{ provider: shm }", "NOT SERVED: portal 127.4.0.1:5555: "),
            ("{ shm: true }", "NOT SERVED: shared memory 127.4.0.1: "),
        ] {
            let text = format!(
                "backends: {{ a: {{ kind: ram, size: 1MiB }} }}\ntargets:\n- name: t\n  \
                 portals: [{{ protocol: srp, listen: 127.4.0.1 }}]\n  luns: {{ 0: a }}\n  \
                 access: open\ntransport: {transport}\nstate: {{ directory: none }}\n"
            );
            let (code, said) = riserd(&text, &["check", "--open", "FILE"]);
            assert_eq!(code, FAILURE, "{said}");
            assert!(said.contains(part) && said.contains(&process), "{said}");
        }
    }

    #[test]
    fn check_reads_every_secret() {
        let user = |name: &str, secret: &str| format!("{{ name: {name}, {secret} }}");
        let missing = |name: &str| user(name, "secret_file: /nowhere/secret");
        let text = format!(
            "backends: {{ a: {{ kind: ram, size: 1MiB }} }}\n\
             discovery_chap: {{ users: [{}], mutual: {} }}\n\
             targets:\n- name: t\n  iqn: iqn.2026-01.a:t\n  \
             portals: [{{ protocol: iscsi, listen: \"127.0.0.1:39262\" }}]\n  luns: {{ 0: a }}\n  \
             chap: {{ users: [{}, {}] }}\n  \
             access:\n  - {{ iqn: iqn.2026-01.a:i, chap: {{ users: [{}] }} }}\n",
            user("d", "secret_credential: riser-test-missing"),
            missing("own"),
            user("good", "secret: a-secret-of-enough-bytes"),
            missing("u"),
            missing("r"),
        );
        let (code, said) = riserd(&text, &["check", "FILE"]);
        assert_eq!(code, 0, "{said}");
        let (code, said) = riserd(&text, &["check", "--open", "FILE"]);
        assert_eq!(code, 1, "{said}");
        for place in [
            "/discovery_chap/users/d",
            "/discovery_chap/mutual",
            "/targets/t/chap/users/u",
            "/targets/t/access/0/chap/users/r",
        ] {
            assert!(
                said.contains(&format!("NOT SERVED: secret {place}: ")),
                "{said}"
            );
        }
        assert_eq!(said.matches("NOT SERVED").count(), 4, "{said}");
    }

    /// Same as on startup (RFC 7143 9.2.1): the secrets are equal, although they have different
    /// sources.
    #[test]
    fn check_rejects_shared_mutual_secret() {
        let file = std::env::temp_dir().join(format!("riserd-secret-{}", std::process::id()));
        std::fs::write(&file, "a-secret-of-enough-bytes\n").unwrap();
        let text = format!(
            "backends: {{ a: {{ kind: ram, size: 1MiB }} }}\n\
             discovery_chap:\n  users: [{{ name: d, secret: another-secret-here }}]\n  \
             mutual: {{ name: own, secret_file: {} }}\n\
             targets:\n- name: t\n  iqn: iqn.2026-01.a:t\n  \
             portals: [{{ protocol: iscsi, listen: \"127.0.0.1:39264\" }}]\n  luns: {{ 0: a }}\n  \
             access:\n  - {{ iqn: iqn.2026-01.a:i, \
             chap: {{ users: [{{ name: r, secret: a-secret-of-enough-bytes }}] }} }}\n",
            file.display()
        );
        let (code, said) = riserd(&text, &["check", "--open", "FILE"]);
        std::fs::remove_file(&file).unwrap();
        assert_eq!(code, 1, "{said}");
        let problem = "NOT SERVED: secret /discovery_chap/mutual: the CHAP user own";
        assert_eq!(said.matches(problem).count(), 1, "{said}");
    }

    #[test]
    fn help_begins_with_all_fabrics() {
        let help = Cli::command().render_help().to_string();
        let first = help.lines().next().unwrap();
        for word in ["SRP", "iSER", "TCP", "iSCSI"] {
            assert!(first.contains(word), "{first}");
        }
    }

    #[test]
    fn failed_run_exits_with_1() {
        assert_eq!(riserd(MINIMAL, &["run", "--config", "FILE"]).0, 0);
        let other = MINIMAL.replace("name: demo", "name: other");
        let (code, said) = riserd(&other, &["run", "--config", "FILE"]);
        assert_eq!((code, said.as_str()), (1, "riserd: cannot serve other"));
    }

    #[test]
    fn devices_lists_loopback_address() {
        let (code, text) = riserd("", &["devices"]);
        assert_eq!(code, 0);
        assert!(
            text.contains("  127.0.0.1 ") && text.contains("path MTU up to 4096"),
            "{text}"
        );
        let (_, text) = riserd("", &["devices", "-o", "json"]);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(
            value["roce"]
                .as_array()
                .unwrap()
                .iter()
                .any(|i| i["address"] == "127.0.0.1")
        );
    }
}
