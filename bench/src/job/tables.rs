//! fio's options that are ignored, that only accept some values, or that are not supported.

use crate::outcome::PERCENTILES;

/// Options that are accepted but have no effect, with reasons.
pub const IGNORED: &[(&str, &str)] = &[
    ("ioengine", "the address selects the transport"),
    (
        "invalidate",
        "caches are not invalidated; direct bypasses the page cache of a file",
    ),
    ("thread", "clones run on the threads of their sessions"),
    (
        "group_reporting",
        "the clones of a section are always reported together",
    ),
    ("new_group", "each section has a separate result"),
    ("gtod_reduce", "reading the clock requires no system call"),
    ("clocksource", "the clock is always CLOCK_MONOTONIC"),
    (
        "random_generator",
        "random numbers always differ from those of fio",
    ),
    (
        "scramble_buffers",
        "verified blocks always differ; use refill_buffers for other blocks",
    ),
    ("verify_state_save", "use --state to set the file"),
    ("verify_state_load", "use --state to set the file"),
    (
        "verify_async",
        "blocks are verified when their reads complete",
    ),
    (
        "iodepth_batch_complete_max",
        "completions are processed as they arrive",
    ),
    ("fallocate", "the size of a device is fixed"),
    ("create_serialize", "the size of a device is fixed"),
    ("overwrite", "the size of a device is fixed"),
    (
        "allow_mounted_write",
        "use --overwrite to allow overwriting data",
    ),
    ("mem", "buffers are allocated by the device"),
    ("iomem", "buffers are allocated by the device"),
    ("registerfiles", "this option only applies to io_uring"),
    ("fixedbufs", "this option only applies to io_uring"),
    ("hipri", "this option only applies to io_uring"),
    ("sqthread_poll", "this option only applies to io_uring"),
    ("userspace_reap", "this option only applies to libaio"),
    ("description", "it is a comment"),
    ("exitall_on_error", "an error always aborts the run"),
    ("disk_util", "the device is not a disk of this kernel"),
    (
        "log_avg_msec",
        "use --interval to set the length of an interval",
    ),
    ("unit_base", "results are in bytes"),
    ("threads", "clones run on the threads of their sessions"),
    ("use_os_rand", "random numbers are generated from the seed"),
    (
        "softrandommap",
        "random offsets are generated without a map",
    ),
    ("disable_lat", "latencies are always measured"),
    ("disable_clat", "latencies are always measured"),
    ("disable_slat", "latencies are always measured"),
    ("disable_bw", "throughput is always measured"),
    ("disable_bw_measurement", "throughput is always measured"),
    ("slat_percentiles", "submission latency is not measured"),
    (
        "bwavgtime",
        "use --interval to set the length of an interval",
    ),
    (
        "iopsavgtime",
        "use --interval to set the length of an interval",
    ),
    ("significant_figures", "the number format is fixed"),
    ("gtod_cpu", "reading the clock requires no system call"),
    ("per_job_logs", "--csv has a column for the job"),
    ("thinktime_spin", "a pause uses no CPU time"),
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
    ("create_on_open", "the size of a device is fixed"),
    ("create_fsync", "the size of a device is fixed"),
    ("allow_file_create", "the size of a device is fixed"),
    ("pre_read", "caches are not filled"),
    ("fadvise_hint", "the address selects the transport"),
    ("write_hint", "the address selects the transport"),
    ("iomem_align", "buffers are allocated by the device"),
    ("mem_align", "buffers are allocated by the device"),
    ("hugepage-size", "buffers are allocated by the device"),
];

/// Options that are accepted and ignored with a warning, because they may be important to users.
/// Includes the reasons.
pub const NOTED: &[(&str, &str)] = &[
    ("nrfiles", "a job runs on one device"),
    (
        "verify_backlog",
        "blocks are verified when they are read, and at the end",
    ),
    (
        "verify_backlog_batch",
        "blocks are verified when they are read, and at the end",
    ),
    ("cpus_allowed", "use taskset(1) to bind the command to CPUs"),
    (
        "cpus_allowed_policy",
        "use taskset(1) to bind the command to CPUs",
    ),
    ("cpumask", "use taskset(1) to bind the command to CPUs"),
    (
        "numa_cpu_nodes",
        "use numactl(8) to bind the command to nodes",
    ),
    (
        "numa_mem_policy",
        "use numactl(8) to bind the command to nodes",
    ),
    ("nice", "use nice(1) to set the priority of the command"),
    ("prio", "use ionice(1) to set the priority of the command"),
    (
        "prioclass",
        "use ionice(1) to set the priority of the command",
    ),
    (
        "ioscheduler",
        "use sysfs to set the scheduler of a block device",
    ),
    (
        "write_bw_log",
        "use --csv or --hdr-log to write results over time",
    ),
    (
        "write_iops_log",
        "use --csv or --hdr-log to write results over time",
    ),
    (
        "write_lat_log",
        "use --csv or --hdr-log to write results over time",
    ),
    (
        "write_hist_log",
        "use --csv or --hdr-log to write results over time",
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
        "random offsets are always generated without a map of previous offsets",
    ),
    (
        "verify_fatal",
        is_on,
        "the first mismatch always aborts the run",
    ),
    (
        "iodepth_batch",
        is_on,
        "operations are submitted as soon as a slot is free",
    ),
    (
        "iodepth_batch_submit",
        is_on,
        "operations are submitted as soon as a slot is free",
    ),
    (
        "iodepth_batch_complete",
        |value| matches!(value, "0" | "1"),
        "completions are processed as they arrive",
    ),
    (
        "iodepth_batch_complete_min",
        |value| matches!(value, "0" | "1"),
        "completions are processed as they arrive",
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
        "lat_ns has percentiles only with a rate; otherwise they are the same as in clat_ns",
    ),
    (
        "percentile_list",
        |value| value.split(':').all(is_percentile),
        "the JSON has fio's default percentiles, from 1 to 99.99; use --bins to add the whole \
         distribution",
    ),
    (
        "unified_rw_reporting",
        |value| matches!(value, "0" | "none"),
        "each kind of operation is reported separately",
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
    ("create_only", "the size of a device is fixed"),
    (
        "thinktime_iotime",
        "a pause follows a number of operations (thinktime_blocks)",
    ),
    (
        "bs_unaligned",
        "offsets are multiples of the smallest block size",
    ),
    (
        "blocksize_unaligned",
        "offsets are multiples of the smallest block size",
    ),
    ("offset_align", "set offset in bytes"),
    ("flow", "use rate_iops, which applies to each job"),
    ("zonesize", "use rw=read:SKIP to read in strides"),
    ("zoneskip", "use rw=read:SKIP to read in strides"),
    ("zonerange", "use rw=read:SKIP to read in strides"),
    (
        "rate_min",
        "a missed rate does not abort a job, but increases response times",
    ),
    (
        "rate_iops_min",
        "a missed rate does not abort a job, but increases response times",
    ),
    (
        "latency_target",
        "use --sweep to show the latency at each depth",
    ),
    ("max_latency", "a late operation does not abort a run"),
    ("percentage_random", "a job is random or sequential"),
    (
        "rw_sequencer",
        "operations after a random offset are sequential",
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
        "the content of a verified block is derived from its header",
    ),
    (
        "verify_interval",
        "the distance between headers is the smallest block size",
    ),
    ("verify_offset", "headers are at the beginning of blocks"),
    ("read_iolog", "operations are only generated from options"),
    ("write_iolog", "operations are not recorded"),
    ("steadystate", "the duration of a run is set by its options"),
    ("wait_for", "use stonewall to wait for all previous jobs"),
    (
        "exitall",
        "a group completes when all of its jobs have completed",
    ),
    ("continue_on_error", "the first error aborts the run"),
    (
        "iodepth_low",
        "an operation is submitted as soon as a slot is free",
    ),
    (
        "rate_cycle",
        "each operation has a planned time, so no mean is maintained",
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
