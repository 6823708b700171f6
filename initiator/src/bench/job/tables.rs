//! fio's options that are ignored, that only accept some values, or that are not supported.

use crate::bench::outcome::PERCENTILES;

/// Options that are accepted but have no effect, with reasons.
pub const IGNORED: &[(&str, &str)] = &[
    ("ioengine", "the address says how the device is reached"),
    (
        "invalidate",
        "caches are not emptied; direct goes past that of a file",
    ),
    ("thread", "clones run on the threads of their sessions"),
    (
        "group_reporting",
        "the clones of a section are always reported together",
    ),
    ("new_group", "each section has a result of its own"),
    ("gtod_reduce", "taking the time is no system call here"),
    ("clocksource", "the clock is always CLOCK_MONOTONIC"),
    (
        "random_generator",
        "the numbers differ from those of fio in any case",
    ),
    (
        "scramble_buffers",
        "blocks that are verified differ anyway; refill_buffers makes others differ",
    ),
    ("verify_state_save", "--state names the file"),
    ("verify_state_load", "--state names the file"),
    (
        "verify_async",
        "blocks are checked where their reads complete",
    ),
    (
        "iodepth_batch_complete_max",
        "completions are handled as they come",
    ),
    ("fallocate", "a device has its size"),
    ("create_serialize", "a device has its size"),
    ("overwrite", "a device has its size"),
    (
        "allow_mounted_write",
        "--overwrite says whether data may be destroyed",
    ),
    ("mem", "buffers are the device's own"),
    ("iomem", "buffers are the device's own"),
    ("registerfiles", "it is an option of io_uring"),
    ("fixedbufs", "it is an option of io_uring"),
    ("hipri", "it is an option of io_uring"),
    ("sqthread_poll", "it is an option of io_uring"),
    ("userspace_reap", "it is an option of libaio"),
    ("description", "it is a comment"),
    ("exitall_on_error", "an error always ends the run"),
    ("disk_util", "the device is no disk of this kernel"),
    ("log_avg_msec", "--interval is the length of an interval"),
    ("unit_base", "results are in bytes"),
    ("threads", "clones run on the threads of their sessions"),
    ("use_os_rand", "random numbers come from the seed"),
    ("softrandommap", "random blocks are drawn without a map"),
    ("disable_lat", "times are always taken"),
    ("disable_clat", "times are always taken"),
    ("disable_slat", "times are always taken"),
    ("disable_bw", "throughput is always measured"),
    ("disable_bw_measurement", "throughput is always measured"),
    ("slat_percentiles", "there is no submission latency"),
    ("bwavgtime", "--interval is the length of an interval"),
    ("iopsavgtime", "--interval is the length of an interval"),
    ("significant_figures", "numbers have a fixed form"),
    ("gtod_cpu", "taking the time is no system call here"),
    ("per_job_logs", "--csv has a column for the job"),
    ("thinktime_spin", "a pause takes no processor time"),
    (
        "thinktime_blocks_type",
        "all operations before a pause have been issued and completed",
    ),
    ("openfiles", "a job runs on one device"),
    ("opendir", "a job runs on one device"),
    ("file_service_type", "a job runs on one device"),
    ("filename_format", "a job runs on one device"),
    ("unique_filename", "a job runs on one device"),
    ("lockfile", "a job runs on one device"),
    ("create_on_open", "a device has its size"),
    ("create_fsync", "a device has its size"),
    ("allow_file_create", "a device has its size"),
    ("pre_read", "caches are not filled"),
    ("fadvise_hint", "the address says how the device is reached"),
    ("write_hint", "the address says how the device is reached"),
    ("iomem_align", "buffers are the device's own"),
    ("mem_align", "buffers are the device's own"),
    ("hugepage-size", "buffers are the device's own"),
];

/// Options that are accepted and ignored with a warning, because they may be important to users.
/// Includes the reasons.
pub const NOTED: &[(&str, &str)] = &[
    ("nrfiles", "a job runs on one device"),
    (
        "verify_backlog",
        "blocks are verified when a read meets them, and at the end",
    ),
    (
        "verify_backlog_batch",
        "blocks are verified when a read meets them, and at the end",
    ),
    (
        "cpus_allowed",
        "taskset(1) binds the whole command to processors",
    ),
    (
        "cpus_allowed_policy",
        "taskset(1) binds the whole command to processors",
    ),
    (
        "cpumask",
        "taskset(1) binds the whole command to processors",
    ),
    (
        "numa_cpu_nodes",
        "numactl(8) binds the whole command to nodes",
    ),
    (
        "numa_mem_policy",
        "numactl(8) binds the whole command to nodes",
    ),
    ("nice", "nice(1) sets the priority of the whole command"),
    ("prio", "ionice(1) sets the priority of the whole command"),
    (
        "prioclass",
        "ionice(1) sets the priority of the whole command",
    ),
    ("ioscheduler", "sysfs has the scheduler of a block device"),
    (
        "write_bw_log",
        "--csv and --hdr-log write figures over time",
    ),
    (
        "write_iops_log",
        "--csv and --hdr-log write figures over time",
    ),
    (
        "write_lat_log",
        "--csv and --hdr-log write figures over time",
    ),
    (
        "write_hist_log",
        "--csv and --hdr-log write figures over time",
    ),
];

/// Name of an option, predicate for its supported values, and the reason why other values are not
/// supported.
pub type Limited = (&'static str, fn(&str) -> bool, &'static str);

/// Options that are only accepted with values that match our behavior.
pub const LIMITED: &[Limited] = &[
    (
        "norandommap",
        is_on,
        "random blocks are always drawn without a map of those that were drawn before",
    ),
    (
        "verify_fatal",
        is_on,
        "the first wrong block always ends the run",
    ),
    (
        "iodepth_batch",
        is_on,
        "operations are submitted as soon as there is room",
    ),
    (
        "iodepth_batch_submit",
        is_on,
        "operations are submitted as soon as there is room",
    ),
    (
        "iodepth_batch_complete",
        |value| matches!(value, "0" | "1"),
        "completions are handled as they come",
    ),
    (
        "iodepth_batch_complete_min",
        |value| matches!(value, "0" | "1"),
        "completions are handled as they come",
    ),
    (
        "io_submit_mode",
        |value| value == "inline",
        "operations are submitted by the thread that completes them",
    ),
    (
        "clat_percentiles",
        is_on,
        "percentiles of clat_ns are always in the JSON",
    ),
    (
        "lat_percentiles",
        is_off,
        "lat_ns has percentiles only with a rate; without one those of clat_ns are the same",
    ),
    (
        "percentile_list",
        |value| value.split(':').all(is_percentile),
        "the JSON has fio's default percentiles, from 1 to 99.99; --bins adds all of the distribution",
    ),
    (
        "unified_rw_reporting",
        |value| matches!(value, "0" | "none"),
        "each kind of operation is reported by itself",
    ),
    ("unlink", is_off, "the device is not removed after a run"),
];

fn is_on(value: &str) -> bool {
    matches!(value, "1" | "true")
}

fn is_off(value: &str) -> bool {
    matches!(value, "0" | "false")
}

/// Returns whether a percentile is included in the JSON output.
fn is_percentile(text: &str) -> bool {
    let known = |percent: f64| PERCENTILES.iter().any(|p| (p - percent).abs() < 1e-9);
    text.trim().parse().is_ok_and(known)
}

/// Options that are known but not supported, with reasons. Options not known to fio are also
/// rejected.
pub const UNSUPPORTED: &[(&str, &str)] = &[
    (
        "directory",
        "a job runs on a device; an address on the command line replaces the directory",
    ),
    ("create_only", "a device has its size"),
    (
        "thinktime_iotime",
        "a pause comes after a number of operations, thinktime_blocks",
    ),
    (
        "bs_unaligned",
        "offsets are multiples of the smallest block size",
    ),
    (
        "blocksize_unaligned",
        "offsets are multiples of the smallest block size",
    ),
    ("offset_align", "give offset in bytes"),
    ("flow", "rate_iops gives each job its share"),
    ("zonesize", "rw=read:SKIP reads in strides"),
    ("zoneskip", "rw=read:SKIP reads in strides"),
    ("zonerange", "rw=read:SKIP reads in strides"),
    (
        "rate_min",
        "a rate that is not reached ends no job; the response times show it",
    ),
    (
        "rate_iops_min",
        "a rate that is not reached ends no job; the response times show it",
    ),
    ("latency_target", "--sweep shows the latency at each depth"),
    ("max_latency", "no operation is too late for a run"),
    ("percentage_random", "a job is random or sequential"),
    (
        "rw_sequencer",
        "the operations behind a random offset follow it in sequence",
    ),
    (
        "blockalign",
        "offsets are multiples of the smallest block size",
    ),
    ("ba", "offsets are multiples of the smallest block size"),
    ("dedupe_percentage", "content is either random or a pattern"),
    (
        "buffer_compress_chunk",
        "the random part of a block comes first, as a whole",
    ),
    (
        "verify_pattern",
        "a verified block has content that follows from its header",
    ),
    (
        "verify_interval",
        "headers are the smallest block size apart",
    ),
    ("verify_offset", "headers are at the beginning of blocks"),
    ("read_iolog", "operations come from the options only"),
    ("write_iolog", "operations are not recorded"),
    ("steadystate", "a run lasts as long as its options say"),
    ("wait_for", "stonewall waits for all jobs before"),
    ("exitall", "a group ends when all of its jobs have ended"),
    ("continue_on_error", "the first error ends the run"),
    (
        "iodepth_low",
        "an operation is submitted as soon as there is room for it",
    ),
    (
        "rate_cycle",
        "each operation has a planned time; there is no mean to be kept",
    ),
];

/// Returns whether an option has no effect here, regardless of its accepted value.
#[must_use]
pub fn is_ignored(name: &str) -> bool {
    has_no_effect(name) || LIMITED.iter().any(|(known, ..)| *known == name)
}

/// Returns whether an option has no effect here, regardless of its value.
pub(super) fn has_no_effect(name: &str) -> bool {
    let mut tables = IGNORED.iter().chain(NOTED);
    // Settings for fio's log files.
    tables.any(|(known, _)| *known == name) || name.starts_with("log_")
}
