//! Parses documents from Riser and fio into summaries.

use serde_json::{Map, Value};
use thiserror::Error;

use crate::outcome::{OpKind, show_disk};

/// Errors when reading a document.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReadError {
    /// The document is not valid JSON.
    #[error("not fio JSON output: {0}")]
    Syntax(String),
    /// A member is missing or has another type.
    #[error("{path}: {wanted}")]
    Member {
        /// Path of the member: `jobs[2].read.iops`.
        path: String,
        /// Expected value.
        wanted: &'static str,
    },
    /// There are multiple processes for a job, with separate results.
    #[error(
        "jobs[{index}] runs concurrently with another job named {name}, and their percentiles cannot be merged; run fio with --group_reporting"
    )]
    Clones {
        /// Index of the second process.
        index: usize,
        /// Name of the job.
        name: String,
    },
}

/// Mean and percentiles of latencies in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LatencySummary {
    /// Mean.
    pub mean: f64,
    /// Percentages and the corresponding maximum latencies, if included in the document.
    pub percentiles: Vec<(f64, f64)>,
}

impl LatencySummary {
    /// Returns the maximum latency for a percentage of the operations.
    #[must_use]
    pub fn at(&self, percent: f64) -> Option<f64> {
        let found = self
            .percentiles
            .iter()
            .find(|(at, _)| (at - percent).abs() < 1e-6);
        found.map(|(_, nanos)| *nanos)
    }
}

/// Results for one kind of operation. There is at least one operation.
#[derive(Clone, Debug, PartialEq)]
pub struct KindSummary {
    /// Kind of operation.
    pub kind: OpKind,
    /// Number of operations.
    pub ios: u64,
    /// Operations per second.
    pub iops: f64,
    /// Bytes per second, always 0 for flushes.
    pub bytes_per_second: f64,
    /// Time between start and completion. This is the only latency that fio reports for flushes.
    pub service: LatencySummary,
    /// Time between planned arrival and completion, if the document includes percentiles.
    pub response: Option<LatencySummary>,
}

/// CPU usage of a process per operation of any kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CpuSummary {
    /// CPU time in nanoseconds.
    pub cpu_ns_per_op: f64,
    /// Context switches.
    pub switches_per_op: f64,
}

/// Summary of a job in a document.
#[derive(Clone, Debug, PartialEq)]
pub struct RunSummary {
    /// Name of the job.
    pub name: String,
    /// Options of the job, including global options that are not overridden. The name is not
    /// included.
    pub options: Vec<(String, String)>,
    /// The disk, the RDMA device used for the connection, and the protection. Only available in Riser's documents.
    pub disk: Option<String>,
    /// Kinds of operations used by the job.
    pub kinds: Vec<KindSummary>,
    /// CPU usage of the process that ran the job.
    pub client: Option<CpuSummary>,
    /// CPU usage of the process that served the disk. Only available in Riser's documents.
    pub server: Option<CpuSummary>,
    /// Notes about the results. Only available in Riser's documents.
    pub notes: Vec<String>,
}

/// Reads the jobs from one or more documents. There can be multiple documents if the output of
/// several fio runs is appended to the same file. Lines before the first document are skipped, as
/// fio prints its warnings there.
///
/// # Errors
/// Returns the member that is missing or invalid, or the position of a syntax error. Fails if any
/// job failed, or if fio used multiple processes for a job without `group_reporting`.
pub fn read(text: &str) -> Result<Vec<RunSummary>, ReadError> {
    let mut start = 0;
    let mut skipped = 0;
    for line in text.split_inclusive('\n') {
        if line.trim_start().starts_with('{') {
            break;
        }
        start += line.len();
        skipped += 1;
    }
    let syntax = |error: serde_json::Error| {
        let (line, column) = (error.line() + skipped, error.column());
        let what = error.to_string();
        let what = what.split(" at line ").next().unwrap_or(&what);
        ReadError::Syntax(format!("line {line}, column {column}: {what}"))
    };
    let mut runs = Vec::new();
    let mut documents = 0;
    for document in serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>() {
        read_document(&document.map_err(syntax)?, &mut runs)?;
        documents += 1;
    }
    match documents {
        0 => Err(ReadError::Syntax("no line starts with {".into())),
        _ => Ok(runs),
    }
}

fn read_document(document: &Value, runs: &mut Vec<RunSummary>) -> Result<(), ReadError> {
    let top = Node {
        path: String::new(),
        value: document,
    };
    let global = document.get("global options").and_then(Value::as_object);
    let jobs = top.member("jobs")?;
    let Some(list) = jobs.value.as_array() else {
        return Err(jobs.wrong("expected an array"));
    };
    let first = runs.len();
    let mut groups: Vec<u64> = Vec::new();
    for (index, value) in list.iter().enumerate() {
        let job = Node {
            path: format!("jobs[{index}]"),
            value,
        };
        let run = read_job(&job, global)?;
        // Jobs in a group run concurrently, so they can't be rounds of the same case.
        let group = job.value.get("groupid").and_then(Value::as_u64);
        let group = group.unwrap_or(index as u64);
        let mut before = runs[first..].iter().zip(&groups);
        if before.any(|(r, g)| *g == group && r.name == run.name && r.options == run.options) {
            let name = run.name;
            return Err(ReadError::Clones { index, name });
        }
        groups.push(group);
        runs.push(run);
    }
    Ok(())
}

fn read_job(job: &Node<'_>, global: Option<&Map<String, Value>>) -> Result<RunSummary, ReadError> {
    let name = job.member("jobname")?;
    let Some(name) = name.value.as_str() else {
        return Err(name.wrong("expected a string"));
    };
    if job.number_or("error", 0.0)? != 0.0 {
        return Err(ReadError::Member {
            path: job.below("error"),
            wanted: "the job failed, so its results are not a complete round",
        });
    }
    let seconds = job.number_or("job_runtime", 0.0)? / 1000.0;
    let lasted = match runtime(job)? {
        0.0 => seconds,
        lasted => lasted,
    };
    let mut kinds = Vec::new();
    for kind in OpKind::ALL {
        // Documents from old versions don't include flushes.
        if kind != OpKind::Flush || job.value.get(kind.name()).is_some() {
            kinds.extend(read_kind(&job.member(kind.name())?, kind, lasted)?);
        }
    }
    let ios: u64 = kinds.iter().map(|kind| kind.ios).sum();
    let ours = job.value.get("riser");
    let side = |name: &str| ours.and_then(|ours| process(ours.get(name)?));
    Ok(RunSummary {
        name: name.to_owned(),
        options: options(job.value.get("job options"), global),
        disk: ours.and_then(|ours| {
            let device = ours.get("device").and_then(Value::as_str);
            let protection = ours.get("protection").and_then(Value::as_u64);
            let protection = protection.and_then(|number| u8::try_from(number).ok());
            Some(show_disk(
                ours.get("address")?.as_str()?,
                device,
                protection,
            ))
        }),
        kinds,
        client: match side("client") {
            Some(client) => Some(client),
            None => of_fio(job, seconds, ios)?,
        },
        server: side("server"),
        notes: ours.map(notes).unwrap_or_default(),
    })
}

/// Returns the runtime of reads, writes or trims in seconds, whichever is longest. The runtime of
/// the job would be the sum over its processes.
fn runtime(job: &Node<'_>) -> Result<f64, ReadError> {
    let mut longest = 0.0_f64;
    for kind in [OpKind::Read, OpKind::Write, OpKind::Trim] {
        let millis = job.member(kind.name())?.number_or("runtime", 0.0)?;
        longest = longest.max(millis / 1000.0);
    }
    Ok(longest)
}

/// Merges options of the job and global options. Options of the job take precedence.
fn options(own: Option<&Value>, global: Option<&Map<String, Value>>) -> Vec<(String, String)> {
    let own = own.and_then(Value::as_object);
    let mut options: Vec<(String, String)> = Vec::new();
    for (key, value) in own.into_iter().chain(global).flatten() {
        let value = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if key != "name" && !options.iter().any(|(known, _)| known == key) {
            options.push((key.clone(), value));
        }
    }
    options
}

fn read_kind(
    node: &Node<'_>,
    kind: OpKind,
    seconds: f64,
) -> Result<Option<KindSummary>, ReadError> {
    let ios = node.number("total_ios")? as u64;
    if ios == 0 {
        return Ok(None);
    }
    let (service, response) = match kind {
        OpKind::Flush => (latency(&node.member("lat_ns")?)?, None),
        _ => {
            let response = latency(&node.member("lat_ns")?)?;
            let given = !response.percentiles.is_empty();
            (
                latency(&node.member("clat_ns")?)?,
                given.then_some(response),
            )
        }
    };
    // fio counts flushes, but doesn't calculate their rate.
    let counted = match seconds {
        0.0 => 0.0,
        seconds => ios as f64 / seconds,
    };
    let kib = node.number_or("bw", 0.0)?;
    Ok(Some(KindSummary {
        kind,
        ios,
        iops: match kind {
            OpKind::Flush => counted,
            _ => node.number("iops")?,
        },
        bytes_per_second: node.number_or("bw_bytes", kib * 1024.0)?,
        service,
        response,
    }))
}

fn latency(node: &Node<'_>) -> Result<LatencySummary, ReadError> {
    let mut percentiles = Vec::new();
    if node.value.get("percentile").is_some() {
        let list = node.member("percentile")?;
        let Some(object) = list.value.as_object() else {
            return Err(list.wrong("expected an object"));
        };
        for (key, value) in object {
            // Old versions of fio include 0.00 for percentiles that are not configured.
            match (key.parse::<f64>(), value.as_f64()) {
                (Ok(percent), Some(nanos)) => percentiles.push((percent, nanos)),
                _ => return Err(list.wrong("expected pairs of a percentage and a time")),
            }
        }
    }
    Ok(LatencySummary {
        mean: node.number("mean")?,
        percentiles,
    })
}

/// Reads the notes from a Riser document. Older versions didn't include any.
fn notes(ours: &Value) -> Vec<String> {
    let notes = ours.get("notes").and_then(Value::as_array);
    let texts = notes.into_iter().flatten().filter_map(Value::as_str);
    texts.map(str::to_owned).collect()
}

/// Reads CPU usage from a Riser document.
fn process(usage: &Value) -> Option<CpuSummary> {
    Some(CpuSummary {
        cpu_ns_per_op: usage.get("cpu_ns_per_io")?.as_f64()?,
        switches_per_op: usage.get("ctx_per_io")?.as_f64()?,
    })
}

/// Calculates CPU usage from fio's percentages and the total runtime of all processes.
fn of_fio(job: &Node<'_>, seconds: f64, ios: u64) -> Result<Option<CpuSummary>, ReadError> {
    if ios == 0 || job.value.get("usr_cpu").is_none() {
        return Ok(None);
    }
    let percent = job.number("usr_cpu")? + job.number("sys_cpu")?;
    Ok(Some(CpuSummary {
        cpu_ns_per_op: percent / 100.0 * seconds * 1e9 / ios as f64,
        switches_per_op: job.number("ctx")? / ios as f64,
    }))
}

/// A value and its path.
struct Node<'a> {
    path: String,
    value: &'a Value,
}

impl<'a> Node<'a> {
    fn below(&self, key: &str) -> String {
        match self.path.as_str() {
            "" => key.to_owned(),
            path => format!("{path}.{key}"),
        }
    }

    fn member(&self, key: &str) -> Result<Node<'a>, ReadError> {
        let path = self.below(key);
        match self.value.get(key) {
            Some(value) => Ok(Node { path, value }),
            None => Err(ReadError::Member {
                path,
                wanted: "missing member; use fio 3 or later",
            }),
        }
    }

    fn number(&self, key: &str) -> Result<f64, ReadError> {
        let member = self.member(key)?;
        match member.value.as_f64() {
            Some(number) if number >= 0.0 => Ok(number),
            _ => Err(member.wrong("expected a non-negative number")),
        }
    }

    fn number_or(&self, key: &str, default: f64) -> Result<f64, ReadError> {
        match self.value.get(key) {
            Some(_) => self.number(key),
            None => Ok(default),
        }
    }

    fn wrong(&self, wanted: &'static str) -> ReadError {
        ReadError::Member {
            path: self.path.clone(),
            wanted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::document::write;
    use super::*;
    use crate::outcome::{Measured, Outcome};
    use crate::output::sample;

    const GOLDEN: &str = include_str!("../golden/fio-3.33.json");

    fn written(outcomes: &[Outcome]) -> String {
        let mut out = Vec::new();
        write(&mut out, outcomes, &sample::machine(), true).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn fio_output_is_parsed() {
        let runs = read(GOLDEN).unwrap();
        assert_eq!(runs.len(), 2);
        let mixed = &runs[0];
        assert_eq!(mixed.name, "mixed");
        let option = |key: &str| {
            let found = mixed.options.iter().find(|(k, _)| k == key);
            found.map(|(_, value)| value.as_str())
        };
        assert_eq!((option("rw"), option("bs")), (Some("randrw"), Some("4k")));
        let kinds: Vec<_> = mixed.kinds.iter().map(|k| (k.kind, k.ios)).collect();
        let expected = [
            (OpKind::Read, 400),
            (OpKind::Write, 400),
            (OpKind::Flush, 95),
        ];
        assert_eq!(kinds, expected);
        let reads = &mixed.kinds[0];
        assert_eq!(reads.iops, 199.900_05);
        assert_eq!(reads.bytes_per_second, 818_790.0);
        assert_eq!(reads.service.at(99.0), Some(19_840.0));
        assert_eq!(reads.service.at(98.0), None);
        assert_eq!(reads.response, None);
        assert_eq!(mixed.kinds[2].iops, 95.0 / 2.001);
        // 1.15 % of two seconds, for 895 operations.
        let client = mixed.client.unwrap();
        assert!((client.cpu_ns_per_op - 0.0115 * 2e9 / 895.0).abs() < 1e-6);
        assert_eq!(client.switches_per_op, 398.0 / 895.0);
        assert_eq!(runs[1].kinds[0].kind, OpKind::Trim);
    }

    #[test]
    fn flush_rate_uses_elapsed_time() {
        let syncs = |from: &str, to: &str| {
            assert!(GOLDEN.contains(from));
            read(&GOLDEN.replace(from, to)).unwrap()[0].kinds[2].iops
        };
        // There are four processes, and fio adds up their times.
        let clones = syncs("\"job_runtime\": 2000", "\"job_runtime\": 8000");
        assert_eq!(clones, 95.0 / 2.001);
        // There are only flushes.
        assert_eq!(syncs("\"runtime\": 2001", "\"runtime\": 0"), 47.5);
    }

    #[test]
    fn written_document_can_be_read() {
        let outcomes = [sample::mixed("a", 1), sample::open_loop("b", 2)];
        let runs = read(&written(&outcomes)).unwrap();
        assert_eq!(runs.len(), 2);
        assert_eq!(runs[0].options, outcomes[0].options);
        assert_eq!(runs[0].disk.as_deref(), Some("srp://127.0.0.1/disk/0"));
        let reads = &runs[1].kinds[0];
        let measured = outcomes[1].of(OpKind::Read);
        assert_eq!(reads.ios, measured.ios());
        assert!((reads.iops - outcomes[1].iops(OpKind::Read)).abs() < 1e-6);
        let response = measured.response.as_ref().unwrap();
        let read = reads.response.as_ref().unwrap();
        assert_eq!(
            read.at(99.9),
            Some(response.value_at_percentile(99.9) as f64)
        );
        let server = runs[0].server.unwrap();
        let ios: u64 = outcomes[0].measured.iter().map(Measured::ios).sum();
        assert!((server.cpu_ns_per_op - 490e6 / ios as f64).abs() < 1e-6);
        assert_eq!(runs[1].server, None);
    }

    #[test]
    fn documents_may_follow_warnings() {
        let text = format!("fio: a warning\n{GOLDEN}{GOLDEN}");
        assert_eq!(read(&text).unwrap().len(), 4);
    }

    #[test]
    fn errors_include_member_path() {
        let message = |from: &str, to: &str| {
            assert!(GOLDEN.contains(from));
            read(&GOLDEN.replacen(from, to, 1)).unwrap_err().to_string()
        };
        let missing = message("\"total_ios\"", "\"none\"");
        assert!(missing.starts_with("jobs[0].read.total_ios: "), "{missing}");
        let wrong = message("\"iops\": 199.90005", "\"iops\": \"fast\"");
        assert!(
            wrong.starts_with("jobs[0].read.iops: expected a non-negative number"),
            "{wrong}"
        );
        let clat = message("\"clat_ns\"", "\"clat\"");
        assert!(clat.starts_with("jobs[0].read.clat_ns: "), "{clat}");
        let failed = message("\"error\": 0", "\"error\": 5");
        assert!(
            failed.starts_with("jobs[0].error: the job failed"),
            "{failed}"
        );
        let cut = read(&GOLDEN[..500]).unwrap_err();
        assert!(matches!(cut, ReadError::Syntax(_)), "{cut}");
        assert!(matches!(read("nothing\n"), Err(ReadError::Syntax(_))));
        assert!(matches!(read("{}"), Err(ReadError::Member { .. })));
    }

    #[test]
    fn syntax_errors_include_file_line() {
        let error = read("fio: a warning\n{\n  \"jobs\": [}\n").unwrap_err();
        let expected = "not fio JSON output: line 3, column 12: expected value";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn concurrent_processes_are_not_rounds() {
        let together = GOLDEN.replace("\"groupid\": 1", "\"groupid\": 0");
        // Jobs with different names can run concurrently.
        assert_eq!(read(&together).unwrap().len(), 2);
        let rounds = written(&[sample::mixed("a", 1), sample::mixed("a", 2)]);
        assert_eq!(read(&rounds).unwrap().len(), 2);
        let clones = rounds.replace("\"groupid\": 1", "\"groupid\": 0");
        let error = read(&clones).unwrap_err();
        assert!(
            matches!(error, ReadError::Clones { index: 1, .. }),
            "{error}"
        );
    }
}
