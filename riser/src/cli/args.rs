//! Command-line verbs and options.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgGroup, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use riser_bench::Job;
use riser_bench::job::Units;
use riser_initiator::protection::ProtectionMode;
use riser_transport::roce::RoceFaults;

use super::address::Address;
use super::examples;
use super::run_args::RunArgs;
use super::target::VerbParser;
use super::units;
use super::vnic_args::VnicArgs;
use super::wire_args::WireArgs;

pub(super) const EXIT_STATUS: &str = "\
Exit status:
  0  success
  1  I/O or protocol error
  2  invalid usage
  3  the target could not be reached or rejected the login
  4  timed out
  5  no such attachment, logical unit or path
  6  the resource is busy or already in use
  7  the data read differs from the data written (bench)
  126, 127  the program cannot be executed, or does not exist (run); otherwise its own status

Addresses:
  srp://HOST[:PORT]/LUN[?KEY=VALUE[&...]]  a logical unit of an SRP target
  iscsi://[USER[%PASSWORD]@]HOST[:PORT]/TARGET/LUN[?KEY=VALUE[&...]]
                                           a logical unit of an iSCSI target. Set the password in
                                           RISER_CHAP_PASSWORD or a file (password_file=), because
                                           command lines are visible to other users
  iser://...                               the same, over RDMA
  ...&portal=HOST[:PORT]&portal=...        additional portals: all are used, and if one fails, its
                                           commands are retried over the others
  ...&paths=all                            all portals reported by an iSCSI target
  KEY=VALUE,...,dest=HOST:PORT             LUN 0 of a target, as written for the kernel's ib_srp
  nbd://HOST[:PORT]/EXPORT                 an export of an NBD server
  nbd+unix:///EXPORT?socket=PATH           the same on a Unix socket
  PATH, file:PATH[?direct=on]              a file or block device of this host; direct=on bypasses
                                           the page cache. PATH alone starts with /, ./ or ../
  mem:SIZE[,BLOCK]                         a disk in the memory of this process, for testing exports

Sizes and offsets are in bytes, or have a suffix: K, M, G, T or KiB to TiB (powers of 1024), or KB
to TB (powers of 1000). Durations are in seconds, or have a suffix: ms, s, m or h.";

/// Find, attach, mount and benchmark remote SCSI logical units in user space.
#[derive(Debug, Parser)]
#[command(name = "riser", version, max_term_width = 100, after_help = EXIT_STATUS)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Args {
    /// Options for all verbs.
    #[command(flatten)]
    pub global: Global,
    /// Verb to run.
    #[command(subcommand)]
    pub verb: Verb,
}

/// Output format for results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Human-readable text
    #[value(alias = "human")]
    Text,
    /// A single JSON document
    Json,
}

/// Options for all verbs.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Select the output format of results
    #[arg(short, long, global = true, value_enum, default_value = "text")]
    pub output: Format,
    /// Set the timeout for a login, for a command, and to start or stop an export; does not apply
    /// to local file I/O
    #[arg(long, global = true, value_name = "DURATION", default_value = "30s", value_parser = units::duration)]
    pub timeout: Duration,
    /// Increase the log level: once for info, twice for debug, three times for trace
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Only log errors, and do not show progress
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Set a log filter, for example "info,riser_transport=debug"; takes precedence over -v and -q
    #[arg(long, global = true, value_name = "FILTER", env = "RISER_LOG")]
    pub log: Option<String>,
    /// Provider for connections to a target. This can also be specified after the verb, where it's
    /// a connection option.
    #[arg(
        long,
        global = true,
        hide = true,
        value_enum,
        value_name = "PROVIDER",
        default_value = "roce",
        env = "RISER_PROVIDER"
    )]
    pub provider: ProviderChoice,
}

/// Client and server of a ping.
#[derive(Debug, Subcommand)]
pub enum Rping {
    /// Send pings and verify the replies
    Client {
        /// Address of the server, which is either riser or rping from rdma-core
        server: IpAddr,
        /// Options for both sides
        #[command(flatten)]
        args: RpingArgs,
    },
    /// Respond to the pings of one client
    Server {
        /// Options for both sides
        #[command(flatten)]
        args: RpingArgs,
    },
}

/// Options for the client and server of a ping.
#[derive(Debug, clap::Args)]
pub struct RpingArgs {
    /// Use the device with this local address
    #[arg(long, value_name = "IP")]
    pub addr: IpAddr,
    /// Select the provider of the device
    #[arg(
        long,
        value_enum,
        value_name = "PROVIDER",
        default_value = "roce",
        env = "RISER_PROVIDER"
    )]
    pub provider: ProviderChoice,
    /// Use this port of the server
    #[arg(long, value_name = "PORT", default_value_t = crate::rping::DEFAULT_PORT)]
    pub port: u16,
    /// Set the number of pings, or 0 to continue until the peer disconnects [default: 10 for a
    /// client, 0 for a server]
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// Set the number of bytes in a ping, or the maximum for a server [default: 64 for a client,
    /// 64K for a server]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    pub size: Option<u64>,
}

/// Provider for connections to a target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ProviderChoice {
    /// Software NIC over UDP; requires neither hardware nor privileges
    #[default]
    Roce,
    /// RDMA device with the local address, using libibverbs and librdmacm
    #[value(name = "rdma_core", alias = "rdma-core")]
    RdmaCore,
    /// Shared memory without packets, only for a target on this host
    Shm,
    /// iWARP (RDMA over TCP), only for iSER
    Iwarp,
    /// Shared memory if all portals are on this host and support it (not for `rping`), otherwise
    /// the RDMA device with the local address if there is one, otherwise the software NIC; selected
    /// once at startup
    Auto,
}

/// Transfer of protection information.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ProtectionChoice {
    /// If the logical unit has it
    #[default]
    Auto,
    /// Never
    Off,
    /// Always: a logical unit without it is rejected
    Require,
}

impl From<ProtectionChoice> for ProtectionMode {
    fn from(choice: ProtectionChoice) -> Self {
        match choice {
            ProtectionChoice::Auto => Self::Auto,
            ProtectionChoice::Off => Self::Off,
            ProtectionChoice::Require => Self::Require,
        }
    }
}

/// Options for the connection to a target.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Connection options")]
pub struct ConnectOptions {
    /// Select the provider for the connection
    #[arg(
        long,
        value_enum,
        value_name = "PROVIDER",
        default_value = "roce",
        env = "RISER_PROVIDER"
    )]
    pub provider: ProviderChoice,
    /// Use this local address for the software NIC, RDMA device or TCP connections [default: an
    /// unused loopback address if the target is on loopback and the software NIC is used, otherwise
    /// the source address of the route to the target]
    #[arg(long, value_name = "IP")]
    pub addr: Option<IpAddr>,
    /// Set the number of channels per SRP session, if supported by the target [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub channels: Option<u8>,
    /// Transfer protection information (T10 DIF) with the data: generate it for writes, and verify
    /// it for reads
    #[arg(long, value_enum, value_name = "WHEN", default_value = "auto")]
    pub protection: ProtectionChoice,
    /// Inject faults into the software NIC for tests: a comma-separated list of loss, duplication,
    /// corruption and reorder, each as a percentage of packets sent and received, and seed
    #[arg(long, value_name = "FAULTS", env = "RISER_INJECT")]
    pub inject: Option<RoceFaults>,
    /// Number used to generate the initiator port, if this must be the same as for a previous
    /// process.
    #[arg(skip)]
    pub port: Option<u64>,
    /// GUID of the initiator port.
    #[arg(skip)]
    pub guid: Option<u64>,
    /// Set if the previous process was not stopped cleanly.
    #[arg(skip)]
    pub recovers: bool,
    /// Cache generation of the unit, as recorded by the previous process.
    #[arg(skip)]
    pub noted: Option<[u8; 16]>,
    /// Set if a login of the previous process was redirected to another port.
    #[arg(skip)]
    pub was_redirected: bool,
    /// Required buffer size in bytes, if larger than the default.
    #[arg(skip)]
    pub buffers: Option<u64>,
}

/// Command-line verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List the local addresses and RDMA devices for connections to targets
    Devices,
    /// List the logical units of a target
    #[command(after_help = examples::DISCOVER)]
    Discover(DiscoverArgs),
    /// List the attachments of this host
    List,
    /// Attach a logical unit as a file (FUSE), an NBD export or a block device (ublk)
    #[command(after_help = examples::ATTACH)]
    Attach(AttachArgs),
    /// Stop an attachment and remove its file, socket or block device
    #[command(after_help = examples::DETACH)]
    Detach(DetachArgs),
    /// Mount the file system of a logical unit, using FUSE and a loop device; requires root
    #[command(after_help = examples::MOUNT)]
    Mount(MountArgs),
    /// Show all information reported by a logical unit
    Inquiry(TargetArgs),
    /// Copy a range of a logical unit to a file or to standard output
    #[command(after_help = examples::READ)]
    Read(ReadArgs),
    /// Copy a file or standard input to a range of a logical unit
    #[command(after_help = examples::WRITE)]
    Write(WriteArgs),
    /// Benchmark a disk or the network, or compare results
    #[command(after_help = examples::BENCH)]
    Bench(Box<BenchArgs>),
    /// Test RDMA connectivity with pings, as client or server
    #[command(subcommand, after_help = examples::RPING)]
    Rping(Rping),
    /// Join a virtual Ethernet over the software NIC with a network interface of this host, until a
    /// signal is received
    Vnic(VnicArgs),
    /// Run an unmodified RDMA program on the software NIC, without an adapter, driver or root
    Run(RunArgs),
    /// Query or configure the target daemon of this host, by running `riserd` with these arguments
    #[command(disable_help_flag = true)]
    Target {
        /// Verb of riserd and its arguments; use `--help` to list all verbs
        #[arg(
            required = true,
            value_name = "ARG",
            value_parser = VerbParser,
            trailing_var_arg = true,
            allow_hyphen_values = true
        )]
        args: Vec<OsString>,
    },
    /// Print the udev properties of an attached block device
    #[command(hide = true)]
    Udev {
        /// Path of the device
        device: PathBuf,
    },
    /// Print the completion script for a shell
    Completions {
        /// Shell for the script
        shell: Shell,
    },
    /// Print the manual page, or write all pages to a directory
    Man {
        /// Write a manual page for each verb to this directory
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

impl Verb {
    /// Returns the default log file of a background process, unless the user has specified one.
    pub(super) fn default_log(&self) -> Option<&Path> {
        let serve = match self {
            Self::Attach(args) => &args.serve,
            Self::Mount(args) => &args.serve,
            _ => return None,
        };
        serve
            .supervised
            .as_deref()
            .filter(|_| serve.log_file.is_none())
    }
}

/// Arguments that only specify a logical unit.
#[derive(Clone, Debug, clap::Args)]
pub struct TargetArgs {
    /// Address of the logical unit
    #[arg(value_name = "URL")]
    pub url: Address,
    /// Options for the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// Arguments of `riser discover`.
#[derive(Clone, Debug, clap::Args)]
pub struct DiscoverArgs {
    /// Address of the target; the logical unit is ignored
    #[arg(value_name = "URL")]
    pub url: Address,
    /// Only list targets and their portals, without logging in
    #[arg(long)]
    pub targets_only: bool,
    /// Options for the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// Selects which runs are compared with each other.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum By {
    /// Same name and workload options, and also the same disk if there are multiple disks in a file
    Options,
    /// Same name
    Name,
}

/// Arguments of `riser bench compare`.
#[derive(Clone, Debug, clap::Args)]
pub struct CompareArgs {
    /// Results used as the baseline: JSON from this command or fio, with one or more documents
    #[arg(value_name = "A")]
    pub a: PathBuf,
    /// Results to compare with the baseline
    #[arg(value_name = "B")]
    pub b: PathBuf,
    /// Select which runs are rounds of the same case
    #[arg(long, value_enum, default_value = "options")]
    pub by: By,
}

/// Arguments of `riser attach`.
#[derive(Clone, Debug, clap::Args)]
#[command(group = ArgGroup::new("export").required(true).args(["fuse", "nbd", "ublk"]))]
pub struct AttachArgs {
    /// Address of the logical unit
    #[arg(value_name = "URL")]
    pub url: Address,
    /// Attach as a file: PATH/lun0 if PATH is a directory, or PATH itself if it is a file
    #[arg(long, value_name = "PATH")]
    pub fuse: Option<PathBuf>,
    /// Attach as an NBD export on this Unix socket
    #[arg(long, value_name = "SOCKET")]
    pub nbd: Option<PathBuf>,
    /// Attach as the block device /dev/ublkbN, by default with an unused number; requires root and
    /// the driver ublk_drv. If riser was killed and left device N with the same address, the device
    /// is recovered
    #[arg(
        long,
        value_name = "N",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "any",
        value_parser = UblkNumber::parse
    )]
    pub ublk: Option<UblkNumber>,
    /// Options for the process that serves the attachment.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Enable caching and readahead of the kernel; not safe if other hosts write to the disk
    #[arg(long, requires = "fuse")]
    pub cache: bool,
    /// Allow other users to access the file
    #[arg(long, requires = "fuse")]
    pub allow_other: bool,
    /// Reject writes to the disk
    #[arg(long)]
    pub read_only: bool,
    /// Options for the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// Number of a block device, or `None` to use any unused number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkNumber(pub Option<u32>);

impl UblkNumber {
    fn parse(text: &str) -> Result<Self, String> {
        if text == "any" {
            return Ok(Self(None));
        }
        let number = text
            .parse()
            .map_err(|_| format!("`{text}` is not a number"))?;
        Ok(Self(Some(number)))
    }
}

/// Options for the process that serves an attachment.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    /// Stay in the foreground until a signal is received or the disk is unmounted
    #[arg(long)]
    pub foreground: bool,
    /// Fail reads, writes and flushes after this time, including reconnections; "never" waits until
    /// `riser detach --force` aborts them. If a connected target does not respond, riser aborts the
    /// command and then resets the unit and the target, which takes up to 15 s longer. After an
    /// error, a file system must be mounted again [default: 60s, or --timeout if that is longer]
    #[arg(long, value_name = "DURATION", value_parser = units::patience)]
    pub io_timeout: Option<Duration>,
    /// Allow several writable attachments of a logical unit on this host; only for programs that
    /// coordinate their writes
    #[arg(long)]
    pub shared: bool,
    /// Write the log of the background process to this file [default: in the directory of the list
    /// of attachments, limited to 2 MiB]
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Report on standard output to the process that started this one. Standard error is this file.
    #[arg(long, hide = true, requires = "foreground", value_name = "LOG")]
    pub supervised: Option<PathBuf>,
}

/// Arguments of `riser mount`.
#[derive(Clone, Debug, clap::Args)]
pub struct MountArgs {
    /// Address of the logical unit
    #[arg(value_name = "URL")]
    pub url: Address,
    /// Mount point
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Set the file system type [default: detected by mount(8)]
    #[arg(short = 't', long = "type", value_name = "TYPE")]
    pub fs_type: Option<String>,
    /// Pass these options to mount(8)
    #[arg(long, value_name = "OPTIONS")]
    pub options: Option<String>,
    /// Mount this partition of the disk
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub partition: Option<u32>,
    /// Mount read-only, and reject writes to the disk
    #[arg(long)]
    pub read_only: bool,
    /// Options for the process that serves the attachment.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Options for the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// Arguments of `riser detach`.
#[derive(Clone, Debug, clap::Args)]
pub struct DetachArgs {
    /// ID, directory, file, socket or device of the attachment
    #[arg(value_name = "ID|PATH")]
    pub what: String,
    /// Detach even if the disk is in use; pending and later I/O fails
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `riser read`.
#[derive(Clone, Debug, clap::Args)]
pub struct ReadArgs {
    /// Address of the logical unit
    #[arg(value_name = "URL")]
    pub url: Address,
    /// File to write to, or "-" for standard output
    #[arg(value_name = "FILE", default_value = "-")]
    pub file: PathBuf,
    /// Start reading at this offset of the logical unit
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = units::size)]
    pub offset: u64,
    /// Read this number of bytes [default: up to the end]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    pub length: Option<u64>,
    /// Options for the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// Arguments of `riser write`.
#[derive(Clone, Debug, clap::Args)]
pub struct WriteArgs {
    /// Address of the logical unit
    #[arg(value_name = "URL")]
    pub url: Address,
    /// File to read from, or "-" for standard input
    #[arg(value_name = "FILE", default_value = "-")]
    pub file: PathBuf,
    /// Start writing at this offset of the logical unit
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = units::size)]
    pub offset: u64,
    /// Write this number of bytes [default: up to the end of the file]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    pub length: Option<u64>,
    /// Do not flush the cache of the target after the last write
    #[arg(long)]
    pub no_flush: bool,
    /// Write even if the logical unit is attached on this host, or contains a file system or
    /// partition table
    #[arg(long)]
    pub overwrite: bool,
    /// Options for the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// A device or job file.
#[derive(Clone, Debug)]
pub enum BenchTarget {
    /// Address of a device.
    Url(Address),
    /// A job file in fio's format.
    JobFile(PathBuf),
}

impl FromStr for BenchTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.ends_with(".fio") {
            return Ok(Self::JobFile(text.into()));
        }
        let address = text.parse().map(Self::Url);
        // All addresses contain a colon, except for paths.
        address.map_err(|why| match text.contains(':') {
            true => why,
            false => format!("{why}; the name of a job file must end in `.fio`"),
        })
    }
}

/// Parses a job option by its name in fio. Each option is validated here, so that its name is
/// included in the error.
fn job_option(name: &'static str) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |text| {
        let set = Job::default().set(name, Some(text), Units::CommandLine);
        set.map(|_| text.to_owned())
    }
}

/// Verbs of `riser bench`.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum BenchVerb {
    /// Compare results, and show significant differences
    Compare(CompareArgs),
    /// Measure the RoCEv2 packet rate of this machine or a network
    Wire(WireArgs),
}

/// Output files of `riser bench`.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Results")]
pub struct ResultsArgs {
    /// Write an HTML page with charts
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Write results over time as CSV
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write latency distributions over time as an HdrHistogram log
    #[arg(long, value_name = "FILE")]
    pub hdr_log: Option<PathBuf>,
    /// Include all latency distributions in the JSON output, as in fio's json+ format
    #[arg(long)]
    pub bins: bool,
}

/// Arguments of `riser bench`.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    /// Verb, unless this is a measurement of a disk.
    #[command(subcommand)]
    pub verb: Option<BenchVerb>,
    /// Address of the disk, or a fio job file with a name ending in .fio
    #[arg(value_name = "URL", required = true)]
    pub target: Option<BenchTarget>,
    /// Disk address for all jobs of the job file, instead of their filename and directory
    #[arg(value_name = "URL")]
    pub url: Option<Address>,
    /// Write even if the logical unit is attached on this host, or contains a file system or
    /// partition table
    #[arg(long)]
    pub overwrite: bool,
    /// Workload specified on the command line.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// Open this number of sessions with the disk, and distribute the jobs over them [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub sessions: Option<u32>,
    /// Record the acknowledged blocks and their contents in this file, so that they can be verified
    /// after a crash; implies --verify
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,
    /// Only verify the blocks recorded in a state file, and do not write
    #[arg(long, alias = "verify_only", requires = "state")]
    pub verify_only: bool,
    /// Run once for each value or combination of values, such as bs=4k,64k depth=1..64 (powers of
    /// two)
    #[arg(long, value_name = "OPTION=VALUE,...", num_args = 1..)]
    pub sweep: Vec<String>,
    /// Repeat all runs this number of times
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Set the interval for results over time
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = units::duration)]
    pub interval: Duration,
    /// Include the CPU usage of the local process that serves the disk
    #[arg(long, value_name = "PID")]
    pub server_pid: Option<u32>,
    /// Output files.
    #[command(flatten)]
    pub results: ResultsArgs,
    /// Options for the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// Workload of `riser bench`, using fio's terminology.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Workload options")]
pub struct WorkloadArgs {
    /// Set the access pattern: read, write, rw, trim or trimwrite, optionally with the prefix rand,
    /// or flush; all patterns overwrite the logical unit except for reads and flushes. read:64k
    /// skips 64 KiB after each operation, randread:8 reads 8 consecutive blocks at each random
    /// offset [default: randread]
    #[arg(long, alias = "readwrite", value_name = "RW", value_parser = job_option("rw"))]
    pub rw: Option<String>,
    /// Set the percentage of reads in mixed workloads [default: 50]
    #[arg(long, visible_alias = "rwmixread", value_name = "PERCENT", value_parser = job_option("rwmixread"))]
    pub mix: Option<String>,
    /// Set the block size; READ,WRITE,TRIM for different sizes [default: 4K]
    #[arg(long, visible_alias = "block-size", value_name = "SIZE", value_parser = job_option("bs"))]
    pub bs: Option<String>,
    /// Use random block sizes in a range, in multiples of the minimum, such as 4K-64K
    #[arg(long, value_name = "RANGE", conflicts_with_all = ["bs", "bssplit"], value_parser = job_option("bsrange"))]
    pub bsrange: Option<String>,
    /// Use block sizes with these percentages, such as 4K/60:64K/40
    #[arg(long, value_name = "SPLIT", conflicts_with = "bs", value_parser = job_option("bssplit"))]
    pub bssplit: Option<String>,
    /// Set the number of operations in flight for each job [default: 32]
    #[arg(long, visible_alias = "iodepth", value_name = "N", value_parser = job_option("iodepth"))]
    pub depth: Option<String>,
    /// Set the number of jobs, each with its own offsets [default: 1]
    #[arg(long, visible_alias = "numjobs", value_name = "N", value_parser = job_option("numjobs"))]
    pub jobs: Option<String>,
    /// Limit each job to this number of operations per second; READ,WRITE,TRIM for different rates.
    /// Operations start at planned times, and latencies include delays by previous operations
    /// [default: unlimited]
    #[arg(long, alias = "rate_iops", value_name = "N", value_parser = job_option("rate_iops"))]
    pub rate_iops: Option<String>,
    /// Limit each job to this number of bytes per second, with planned times as for --rate-iops
    /// [default: unlimited]
    #[arg(long, value_name = "SIZE", conflicts_with = "rate_iops", value_parser = job_option("rate"))]
    pub rate: Option<String>,
    /// Set the distribution of planned times: linear or poisson [default: linear]
    #[arg(long, alias = "rate_process", value_name = "PROCESS", value_parser = job_option("rate_process"))]
    pub rate_process: Option<String>,
    /// Set the distribution of random offsets: random, zipf:1.2, zoned:80/20:20/80 (percentage of
    /// operations/blocks) or hotspot:20/80 [default: random]
    #[arg(long, alias = "random_distribution", value_name = "DISTRIBUTION", value_parser = job_option("random_distribution"))]
    pub random_distribution: Option<String>,
    /// Set the duration of the measurement [default: 10s, unless a number of bytes or operations is
    /// set]
    #[arg(long, value_name = "DURATION", value_parser = units::duration, conflicts_with = "total")]
    pub runtime: Option<Duration>,
    /// Transfer this number of bytes for all jobs together, instead of a fixed duration
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    pub total: Option<u64>,
    /// Transfer this number of bytes for each job; with --runtime, stop at the first limit
    #[arg(long, alias = "io_size", value_name = "SIZE", value_parser = job_option("io_size"))]
    pub io_size: Option<String>,
    /// Run this number of operations for each job; with --runtime, stop at the first limit
    #[arg(long, alias = "number_ios", value_name = "N", value_parser = job_option("number_ios"))]
    pub number_ios: Option<String>,
    /// Warm up for this time before the measurement [default: 1s]
    #[arg(long, visible_alias = "ramp-time", alias = "ramp_time", value_name = "DURATION", value_parser = units::duration)]
    pub warm_up: Option<Duration>,
    /// Start the tested region at this byte or percentage of the disk [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = job_option("offset"))]
    pub offset: Option<String>,
    /// Set the size of the tested region in bytes or as a percentage of the disk [default: up to
    /// the end]
    #[arg(long, value_name = "SIZE", value_parser = job_option("size"))]
    pub size: Option<String>,
    /// Flush after every N writes [default: never]
    #[arg(long, value_name = "N", value_parser = job_option("fsync"))]
    pub fsync: Option<String>,
    /// Write with FUA: each write completes when it is on stable storage
    #[arg(long)]
    pub fua: bool,
    /// Generate new contents for each write
    #[arg(long, alias = "refill_buffers")]
    pub refill_buffers: bool,
    /// Set the compressible percentage of the contents [default: 0]
    #[arg(long, alias = "buffer_compress_percentage", value_name = "PERCENT", value_parser = job_option("buffer_compress_percentage"))]
    pub buffer_compress_percentage: Option<String>,
    /// Fill all blocks with this pattern: a number, such as 0xdeadbeef, or "text" in double quotes
    #[arg(long, alias = "buffer_pattern", value_name = "PATTERN", value_parser = job_option("buffer_pattern"))]
    pub buffer_pattern: Option<String>,
    /// Add a header with a checksum (crc32c, crc32 or crc64) to each block, verify all reads, and
    /// read back all writes. If there are only reads, verify the blocks written by a previous run
    #[arg(long, value_name = "CHECKSUM", num_args = 0..=1, require_equals = true, default_missing_value = "crc32c", value_parser = job_option("verify"))]
    pub verify: Option<String>,
    /// Set the seed for random numbers [default: 1]
    #[arg(long, visible_alias = "randseed", value_name = "N", value_parser = job_option("randseed"))]
    pub seed: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn common_options_precede_or_follow_verb() {
        let url = "srp://127.0.0.1/0";
        for (words, format, provider) in [
            (
                &["inquiry", url] as &[&str],
                Format::Text,
                ProviderChoice::Roce,
            ),
            (
                &["-o", "human", "inquiry", url],
                Format::Text,
                ProviderChoice::Roce,
            ),
            (
                &["inquiry", url, "-o", "json"],
                Format::Json,
                ProviderChoice::Roce,
            ),
            (
                &["--provider", "auto", "-o", "text", "inquiry", url],
                Format::Text,
                ProviderChoice::Auto,
            ),
            (
                &["inquiry", "--provider", "rdma_core", url],
                Format::Text,
                ProviderChoice::RdmaCore,
            ),
        ] {
            let words = std::iter::once(&"riser").chain(words);
            let args = Args::try_parse_from(words).unwrap();
            let Verb::Inquiry(inquiry) = &args.verb else {
                panic!("{args:?}");
            };
            let found = (args.global.output, inquiry.link.provider);
            assert_eq!(found, (format, provider), "{args:?}");
        }
        let words = [
            "riser",
            "--provider",
            "auto",
            "rping",
            "server",
            "--addr",
            "::1",
        ];
        let args = Args::try_parse_from(words).unwrap();
        let Verb::Rping(Rping::Server { args }) = args.verb else {
            panic!("{args:?}");
        };
        assert_eq!(args.provider, ProviderChoice::Auto);
    }

    #[test]
    fn job_file_requires_fio_extension() {
        let refused = |text: &str| text.parse::<BenchTarget>().unwrap_err();
        assert!(refused("jobs.ini").contains("must end in `.fio`"));
        assert!(!refused("http://host/").contains(".fio"));
    }

    #[test]
    fn verbs_accept_all_global_options() {
        let mut command = Args::command();
        command.build();
        for verb in command.get_subcommands().filter(|v| v.get_name() != "help") {
            for option in ["output", "timeout", "verbose", "quiet", "log"] {
                let has = verb.get_arguments().any(|arg| arg.get_id() == option);
                assert!(has, "{} takes no {option}", verb.get_name());
            }
        }
    }
}
