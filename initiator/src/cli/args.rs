//! Verbs and options.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgGroup, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use riser_transport::roce::RoceFaults;

use super::address::Address;
use super::examples;
use super::run_args::RunArgs;
use super::target::VerbParser;
use super::units;
use super::vnic_args::VnicArgs;
use super::wire_args::WireArgs;
use crate::bench::Job;
use crate::bench::job::Units;

pub(super) const EXIT_STATUS: &str = "\
Exit status:
  0  success
  1  an I/O or protocol failure
  2  wrong usage
  3  the target could not be reached or refused the login
  4  timed out
  5  no such attachment, logical unit or path
  6  busy, or in use already
  7  data that were read are not those that were written (bench)
  126, 127  the program cannot be run, or does not exist (run); otherwise its own status

Addresses:
  srp://HOST[:PORT]/LUN[?KEY=VALUE[&...]]  a logical unit of an SRP target
  iscsi://[USER[%PASSWORD]@]HOST[:PORT]/TARGET/LUN[?KEY=VALUE[&...]]
                                           a logical unit of an iSCSI target; passwords are better
                                           in RISER_CHAP_PASSWORD or in a file (password_file=)
  iser://...                               the same, over RDMA
  ...&portal=HOST[:PORT]&portal=...        further portals of the target: all are used at once, and
                                           commands of one that is lost go by the others
  ...&paths=all                            every portal that an iSCSI target reports
  KEY=VALUE,...,dest=HOST:PORT             the same as written for the kernel's ib_srp; LUN 0
  nbd://HOST[:PORT]/EXPORT                 an export of an NBD server
  nbd+unix:///EXPORT?socket=PATH           the same on a Unix socket
  PATH, file:PATH[?direct=on]              a file or block device of this host; direct=on goes past
                                           the page cache. PATH alone begins with /, ./ or ../
  mem:SIZE[,BLOCK]                         a disk in the memory of this process, to try exports with

Sizes and offsets are bytes, or have a suffix K, M, G or T, alone or as KiB to TiB (powers of 1024),
or KB to TB (powers of 1000). Durations are seconds, or have a suffix ms, s, m or h.";

/// Finds, attaches, mounts and benchmarks remote SCSI logical units, in user space.
#[derive(Debug, Parser)]
#[command(name = "riser", version, max_term_width = 100, after_help = EXIT_STATUS)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct Args {
    /// Options of every verb.
    #[command(flatten)]
    pub global: Global,
    /// Verb of the command line.
    #[command(subcommand)]
    pub verb: Verb,
}

/// Format in which results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text for people
    #[value(alias = "human")]
    Text,
    /// A single JSON document
    Json,
}

/// Options of every verb.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Format of results
    #[arg(short, long, global = true, value_enum, default_value = "text")]
    pub output: Format,
    /// Longest wait for a login, for one command, for an export to be usable or gone; reads and
    /// writes of local files have no limit
    #[arg(long, global = true, value_name = "DURATION", default_value = "30s", value_parser = units::duration)]
    pub timeout: Duration,
    /// Log more: once for information, twice for debugging, three times for everything
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Log errors only, and show no progress
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Log filter, for example "info,riser_transport=debug"; goes before -v and -q
    #[arg(long, global = true, value_name = "FILTER", env = "RISER_LOG")]
    pub log: Option<String>,
    /// Provider by which a target is reached. It may also stand after the verb, where it is an
    /// option of the connection.
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

/// The two sides of a ping.
#[derive(Debug, Subcommand)]
pub enum Rping {
    /// Send pings and compare what comes back
    Client {
        /// Address of the server, which is another riser or rdma-core's rping
        server: IpAddr,
        /// Options of both sides
        #[command(flatten)]
        args: RpingArgs,
    },
    /// Answer the pings of one client
    Server {
        /// Options of both sides
        #[command(flatten)]
        args: RpingArgs,
    },
}

/// Options of both sides of a ping.
#[derive(Debug, clap::Args)]
pub struct RpingArgs {
    /// Local address of the device
    #[arg(long, value_name = "IP")]
    pub addr: IpAddr,
    /// Provider that drives the device
    #[arg(
        long,
        value_enum,
        value_name = "PROVIDER",
        default_value = "roce",
        env = "RISER_PROVIDER"
    )]
    pub provider: ProviderChoice,
    /// Port of the server
    #[arg(long, value_name = "PORT", default_value_t = crate::rping::DEFAULT_PORT)]
    pub port: u16,
    /// Pings; 0 goes on until the peer leaves [default: 10 for a client, 0 for a server]
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// Bytes of a ping; a server takes no longer one [default: 64 for a client, 64K for a server]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    pub size: Option<u64>,
}

/// Provider by which a target is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ProviderChoice {
    /// The software NIC, over UDP; needs no hardware and no privilege
    #[default]
    Roce,
    /// The RDMA device that has the local address, through libibverbs and librdmacm
    #[value(name = "rdma_core", alias = "rdma-core")]
    RdmaCore,
    /// Memory shared with the target, on this host only: no packets
    Shm,
    /// iWARP: RDMA over TCP, for iSER only
    Iwarp,
    /// Shared memory if all portals are of this host and offer it (`rping` takes it by its name only),
    /// otherwise the RDMA device that has the local address if there is one, otherwise the software NIC;
    /// decided once, at the start
    Auto,
}

/// Options of the connection to a target.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Connection options")]
pub struct ConnectOptions {
    /// Provider by which the target is reached
    #[arg(
        long,
        value_enum,
        value_name = "PROVIDER",
        default_value = "roce",
        env = "RISER_PROVIDER"
    )]
    pub provider: ProviderChoice,
    /// Local address of the software NIC or RDMA device, or of TCP connections [default: for the
    /// software NIC and a target on loopback a free loopback address, otherwise the address that
    /// the route to the target has]
    #[arg(long, value_name = "IP")]
    pub addr: Option<IpAddr>,
    /// Channels of the session, for targets that allow several
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub channels: Option<u8>,
    /// Make the software NIC's wire bad, for tests: a comma-separated list of loss, duplication,
    /// corruption and reorder, each in percent of the packets sent and of those received, and seed
    #[arg(long, value_name = "FAULTS", env = "RISER_INJECT")]
    pub inject: Option<RoceFaults>,
    /// Number that the initiator port follows from, if it is to be that of an earlier process.
    #[arg(skip)]
    pub port: Option<u64>,
    /// GUID of that port.
    #[arg(skip)]
    pub guid: Option<u64>,
    /// That process did not end properly.
    #[arg(skip)]
    pub recovers: bool,
    /// The generation of the unit's cache that it had noted.
    #[arg(skip)]
    pub noted: Option<[u8; 16]>,
    /// Bytes of buffers that are needed at once, if more than by default.
    #[arg(skip)]
    pub buffers: Option<u64>,
}

/// Verb of the command line.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List the addresses and RDMA devices that a target can be reached with
    Devices,
    /// List the logical units of a target
    #[command(after_help = examples::DISCOVER)]
    Discover(DiscoverArgs),
    /// List the attachments of this host
    List,
    /// Make a logical unit a file (FUSE), a network block device (NBD) or a block device (ublk) of
    /// this host
    #[command(after_help = examples::ATTACH)]
    Attach(AttachArgs),
    /// Undo an attachment: the disk disappears
    #[command(after_help = examples::DETACH)]
    Detach(DetachArgs),
    /// Mount the file system on a logical unit, through FUSE and a loop device; needs root
    #[command(after_help = examples::MOUNT)]
    Mount(MountArgs),
    /// Show everything that a logical unit reports about itself
    Inquiry(TargetArgs),
    /// Copy a range of a logical unit to a file or to standard output
    #[command(after_help = examples::READ)]
    Read(ReadArgs),
    /// Copy a file or standard input to a range of a logical unit
    #[command(after_help = examples::WRITE)]
    Write(WriteArgs),
    /// Measure a disk, compare results, or measure the wire
    #[command(after_help = examples::BENCH)]
    Bench(Box<BenchArgs>),
    /// Ping a host over RDMA, or answer such pings: the first thing to run on a new network
    #[command(subcommand, after_help = examples::RPING)]
    Rping(Rping),
    /// Be a member of a virtual Ethernet over the software NIC: an interface of this host whose frames
    /// travel over the storage network, until a signal
    Vnic(VnicArgs),
    /// Run an RDMA program, unmodified, on the software NIC: without an adapter, a driver or root
    Run(RunArgs),
    /// Ask or change the target daemon of this host: runs `riserd` with these arguments
    #[command(disable_help_flag = true)]
    Target {
        /// A verb of riserd and what it takes; `--help` lists them all
        #[arg(
            required = true,
            value_name = "ARG",
            value_parser = VerbParser,
            trailing_var_arg = true,
            allow_hyphen_values = true
        )]
        args: Vec<OsString>,
    },
    /// Print what udev names an attached block device by
    #[command(hide = true)]
    Udev {
        /// Path of the device
        device: PathBuf,
    },
    /// Print the completion script of a shell
    Completions {
        /// Shell that the script is for
        shell: Shell,
    },
    /// Print the manual page, or write all of them
    Man {
        /// Write a page for each verb into this directory
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

impl Verb {
    /// Log file of a background process that the user has not named.
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

/// A logical unit and nothing else.
#[derive(Clone, Debug, clap::Args)]
pub struct TargetArgs {
    /// Address of the logical unit
    #[arg(value_name = "URL")]
    pub url: Address,
    /// Options of the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// Arguments of `riser discover`.
#[derive(Clone, Debug, clap::Args)]
pub struct DiscoverArgs {
    /// Address of the target; a logical unit in it does not matter
    #[arg(value_name = "URL")]
    pub url: Address,
    /// List the targets and their portals only, without a login to any of them
    #[arg(long)]
    pub targets_only: bool,
    /// Options of the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// Choice of the runs that belong together, on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum By {
    /// Same name and same options of the workload; which disk it was matters if a file has several
    Options,
    /// Same name
    Name,
}

/// Arguments of `riser bench compare`.
#[derive(Clone, Debug, clap::Args)]
pub struct CompareArgs {
    /// Results to compare with: JSON of this command or of fio, one or more documents
    #[arg(value_name = "A")]
    pub a: PathBuf,
    /// Results to judge
    #[arg(value_name = "B")]
    pub b: PathBuf,
    /// Runs that are rounds of one case
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
    /// As a file: PATH/lun0 if PATH is a directory, PATH itself if it is a file
    #[arg(long, value_name = "PATH")]
    pub fuse: Option<PathBuf>,
    /// As an NBD export on a Unix socket
    #[arg(long, value_name = "SOCKET")]
    pub nbd: Option<PathBuf>,
    /// As the block device /dev/ublkbN, or one with a free number; needs root and the driver
    /// ublk_drv. A device N that a killed riser has left is taken over, if it was of the same
    /// address
    #[arg(
        long,
        value_name = "N",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "any",
        value_parser = UblkNumber::parse
    )]
    pub ublk: Option<UblkNumber>,
    /// Options of what serves an attachment.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Let the kernel cache the file, with readahead; do not use it where other hosts write
    #[arg(long, requires = "fuse")]
    pub cache: bool,
    /// Let other users use the file
    #[arg(long, requires = "fuse")]
    pub allow_other: bool,
    /// Refuse writes to it
    #[arg(long)]
    pub read_only: bool,
    /// Options of the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// The number of a block device: one, or any that is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkNumber(pub Option<u32>);

impl UblkNumber {
    fn parse(text: &str) -> Result<Self, String> {
        if text == "any" {
            return Ok(Self(None));
        }
        let number = text.parse().map_err(|_| format!("`{text}` is no number"))?;
        Ok(Self(Some(number)))
    }
}

/// Options of what serves an attachment.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    /// Stay in the foreground, until a signal or an unmount ends it
    #[arg(long)]
    pub foreground: bool,
    /// Longest time for a read, write or flush before it fails, reconnections included, or "never"
    /// to wait as long as it takes; then `riser detach --force` ends what waits. A target that is
    /// connected and does not answer is first asked to abort the command, then to reset the unit,
    /// then itself: up to 15 s more. A file system that meets an error is unusable until it is
    /// mounted again [default: 60s, or
    /// --timeout if that is longer]
    #[arg(long, value_name = "DURATION", value_parser = units::patience)]
    pub io_timeout: Option<Duration>,
    /// Attach a logical unit even if this host has it attached for writing already, for programs
    /// that coordinate their writes
    #[arg(long)]
    pub shared: bool,
    /// Log file of the background process [default: beside the list of attachments, limited to
    /// 2 MiB]
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Report to the process that started this one on standard output; standard error is this file.
    #[arg(long, hide = true, requires = "foreground", value_name = "LOG")]
    pub supervised: Option<PathBuf>,
}

/// Arguments of `riser mount`.
#[derive(Clone, Debug, clap::Args)]
pub struct MountArgs {
    /// Address of the logical unit
    #[arg(value_name = "URL")]
    pub url: Address,
    /// Directory to mount it on
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Type of the file system [default: what mount(8) finds]
    #[arg(short = 't', long = "type", value_name = "TYPE")]
    pub fs_type: Option<String>,
    /// Options that mount(8) gets
    #[arg(long, value_name = "OPTIONS")]
    pub options: Option<String>,
    /// Mount this partition of the disk
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub partition: Option<u32>,
    /// Mount it read-only, and refuse writes below as well
    #[arg(long)]
    pub read_only: bool,
    /// Options of what serves an attachment.
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Options of the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// Arguments of `riser detach`.
#[derive(Clone, Debug, clap::Args)]
pub struct DetachArgs {
    /// Id, directory, file, socket or device of the attachment
    #[arg(value_name = "ID|PATH")]
    pub what: String,
    /// Detach it even if it is in use; its users get errors
    #[arg(long)]
    pub force: bool,
}

/// Arguments of `riser read`.
#[derive(Clone, Debug, clap::Args)]
pub struct ReadArgs {
    /// Address of the logical unit
    #[arg(value_name = "URL")]
    pub url: Address,
    /// File to write to; "-" is standard output
    #[arg(value_name = "FILE", default_value = "-")]
    pub file: PathBuf,
    /// Offset of the first byte
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = units::size)]
    pub offset: u64,
    /// Number of bytes [default: to the end]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    pub length: Option<u64>,
    /// Options of the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// Arguments of `riser write`.
#[derive(Clone, Debug, clap::Args)]
pub struct WriteArgs {
    /// Address of the logical unit
    #[arg(value_name = "URL")]
    pub url: Address,
    /// File to read from; "-" is standard input
    #[arg(value_name = "FILE", default_value = "-")]
    pub file: PathBuf,
    /// Offset of the first byte
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = units::size)]
    pub offset: u64,
    /// Number of bytes [default: to the end of the file]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    pub length: Option<u64>,
    /// Do not flush the target's cache at the end
    #[arg(long)]
    pub no_flush: bool,
    /// Write even if this host has the logical unit attached, or a file system or partition table
    /// is on it
    #[arg(long)]
    pub overwrite: bool,
    /// Options of the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// A device, or a file of jobs.
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
        // Every address but a path has a colon.
        address.map_err(|why| match text.contains(':') {
            true => why,
            false => format!("{why}; the name of a job file ends in `.fio`"),
        })
    }
}

/// Options that a job of the command line is made of, by fio's names. Each is checked here, so that
/// its error names it.
fn job_option(name: &'static str) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |text| {
        let set = Job::default().set(name, Some(text), Units::CommandLine);
        set.map(|_| text.to_owned())
    }
}

/// Tasks of `riser bench` beside measuring a disk.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum BenchVerb {
    /// Compare results, and show whether their differences are beyond noise
    Compare(CompareArgs),
    /// Measure what this machine or network carries in packets of RoCEv2
    Wire(WireArgs),
}

/// Places of results of `riser bench`, beside standard output.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Results")]
pub struct ResultsArgs {
    /// Write a page for a browser, with pictures
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Write the figures over time as CSV
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write the distributions over time as a log of HdrHistogram
    #[arg(long, value_name = "FILE")]
    pub hdr_log: Option<PathBuf>,
    /// Add all distributions to the JSON, as fio's json+ does
    #[arg(long)]
    pub bins: bool,
}

/// Arguments of `riser bench`.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    /// Task instead of measuring a disk.
    #[command(subcommand)]
    pub verb: Option<BenchVerb>,
    /// Address of the disk, or a job file of fio, whose name ends in .fio
    #[arg(value_name = "URL", required = true)]
    pub target: Option<BenchTarget>,
    /// Address for all jobs of the file, in place of their filename and directory
    #[arg(value_name = "URL")]
    pub url: Option<Address>,
    /// Write even if this host has the logical unit attached, or a file system or partition table
    /// is on it
    #[arg(long)]
    pub overwrite: bool,
    /// Workload of the command line.
    #[command(flatten)]
    pub workload: WorkloadArgs,
    /// Connections to the device, over which the jobs are distributed [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub sessions: Option<u32>,
    /// File that records which blocks were acknowledged with which content, so that they can be
    /// checked after a crash; implies --verify
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,
    /// Check the blocks that a state file records, and write nothing
    #[arg(long, alias = "verify_only", requires = "state")]
    pub verify_only: bool,
    /// Run once for each value, or each combination of values of several options: bs=4k,64k
    /// depth=1..64 (powers of two)
    #[arg(long, value_name = "OPTION=VALUE,...", num_args = 1..)]
    pub sweep: Vec<String>,
    /// Run everything this many times
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Length of the intervals of figures over time
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = units::duration)]
    pub interval: Duration,
    /// Process of this host that serves the disk: its use of the processor is measured too
    #[arg(long, value_name = "PID")]
    pub server_pid: Option<u32>,
    /// Files for results.
    #[command(flatten)]
    pub results: ResultsArgs,
    /// Options of the connection.
    #[command(flatten)]
    pub link: ConnectOptions,
}

/// The workload of `riser bench`, with fio's words.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Workload options")]
pub struct WorkloadArgs {
    /// Order and direction: read, write, rw, trim, trimwrite, the same with rand before it, or
    /// flush; all but the reads overwrite the logical unit. read:64k skips 64 KiB behind each
    /// operation, randread:8 reads 8 blocks in sequence at each random place [default: randread]
    #[arg(long, alias = "readwrite", value_name = "RW", value_parser = job_option("rw"))]
    pub rw: Option<String>,
    /// Reads of a hundred operations, where there are both [default: 50]
    #[arg(long, visible_alias = "rwmixread", value_name = "PERCENT", value_parser = job_option("rwmixread"))]
    pub mix: Option<String>,
    /// Bytes of one operation; READ,WRITE,TRIM if they differ [default: 4K]
    #[arg(long, visible_alias = "block-size", value_name = "SIZE", value_parser = job_option("bs"))]
    pub bs: Option<String>,
    /// Sizes from one to another, in multiples of the first: 4K-64K
    #[arg(long, value_name = "RANGE", conflicts_with_all = ["bs", "bssplit"], value_parser = job_option("bsrange"))]
    pub bsrange: Option<String>,
    /// Sizes with their percentages: 4K/60:64K/40
    #[arg(long, value_name = "SPLIT", conflicts_with = "bs", value_parser = job_option("bssplit"))]
    pub bssplit: Option<String>,
    /// Operations of one job in flight [default: 32]
    #[arg(long, visible_alias = "iodepth", value_name = "N", value_parser = job_option("iodepth"))]
    pub depth: Option<String>,
    /// Jobs, each with its own offsets [default: 1]
    #[arg(long, visible_alias = "numjobs", value_name = "N", value_parser = job_option("numjobs"))]
    pub jobs: Option<String>,
    /// Operations per second of each job; READ,WRITE,TRIM if they differ. They start at planned
    /// times, and what waits because others are slow is counted with its wait
    #[arg(long, alias = "rate_iops", value_name = "N", value_parser = job_option("rate_iops"))]
    pub rate_iops: Option<String>,
    /// Bytes per second of each job, as --rate-iops
    #[arg(long, value_name = "SIZE", conflicts_with = "rate_iops", value_parser = job_option("rate"))]
    pub rate: Option<String>,
    /// Planned times: linear or poisson [default: linear]
    #[arg(long, alias = "rate_process", value_name = "PROCESS", value_parser = job_option("rate_process"))]
    pub rate_process: Option<String>,
    /// Distribution of random offsets: random, zipf:1.2, zoned:80/20:20/80 (operations/blocks, in
    /// percent) or hotspot:20/80 [default: random]
    #[arg(long, alias = "random_distribution", value_name = "DISTRIBUTION", value_parser = job_option("random_distribution"))]
    pub random_distribution: Option<String>,
    /// Time to measure [default: 10s, unless a number of bytes or operations is given]
    #[arg(long, value_name = "DURATION", value_parser = units::duration, conflicts_with = "total")]
    pub runtime: Option<Duration>,
    /// Number of bytes that all jobs move together instead
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    pub total: Option<u64>,
    /// Number of bytes that each job moves; with --runtime, whichever comes first
    #[arg(long, alias = "io_size", value_name = "SIZE", value_parser = job_option("io_size"))]
    pub io_size: Option<String>,
    /// Number of operations of each job; with --runtime, whichever comes first
    #[arg(long, alias = "number_ios", value_name = "N", value_parser = job_option("number_ios"))]
    pub number_ios: Option<String>,
    /// Time to run before measuring [default: 1s]
    #[arg(long, visible_alias = "ramp-time", alias = "ramp_time", value_name = "DURATION", value_parser = units::duration)]
    pub warm_up: Option<Duration>,
    /// First byte of the region, or a percentage of the device [default: 0]
    #[arg(long, value_name = "SIZE", value_parser = job_option("offset"))]
    pub offset: Option<String>,
    /// Length of the region, or a percentage of the device [default: to the end]
    #[arg(long, value_name = "SIZE", value_parser = job_option("size"))]
    pub size: Option<String>,
    /// Flush after every N writes
    #[arg(long, value_name = "N", value_parser = job_option("fsync"))]
    pub fsync: Option<String>,
    /// Wait with every write for stable storage
    #[arg(long)]
    pub fua: bool,
    /// Give every write new content
    #[arg(long, alias = "refill_buffers")]
    pub refill_buffers: bool,
    /// Part of the content that compression removes
    #[arg(long, alias = "buffer_compress_percentage", value_name = "PERCENT", value_parser = job_option("buffer_compress_percentage"))]
    pub buffer_compress_percentage: Option<String>,
    /// Content to repeat: 0xdeadbeef, a number or "text" in double quotes
    #[arg(long, alias = "buffer_pattern", value_name = "PATTERN", value_parser = job_option("buffer_pattern"))]
    pub buffer_pattern: Option<String>,
    /// Give each block a header with a checksum (crc32c, crc32 or crc64), check what is read, and
    /// read back what is written. Reads alone check what an earlier run has written
    #[arg(long, value_name = "CHECKSUM", num_args = 0..=1, require_equals = true, default_missing_value = "crc32c", value_parser = job_option("verify"))]
    pub verify: Option<String>,
    /// Seed of the random numbers [default: 1]
    #[arg(long, visible_alias = "randseed", value_name = "N", value_parser = job_option("randseed"))]
    pub seed: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn options_that_many_verbs_have_go_before_or_after_the_verb() {
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
    fn a_job_file_with_another_name_is_explained() {
        let refused = |text: &str| text.parse::<BenchTarget>().unwrap_err();
        assert!(refused("jobs.ini").contains("ends in `.fio`"));
        assert!(!refused("http://host/").contains(".fio"));
    }

    #[test]
    fn every_verb_takes_the_options_of_all() {
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
