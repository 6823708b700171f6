//! Job files in fio's format.
//!
//! ```text
//!   ; a comment
//!   [global]            options of all sections that follow
//!   bs=4k
//!   [name]              a job
//!   rw=randread
//!   stonewall           waits for the jobs before it
//!   size=${SIZE}        from the environment
//!   numjobs=$ncpus      from this host
//!   include more.inc    the lines of another file
//! ```
//!
//! Options that can be ignored safely are accepted ([`IGNORED`](super::job::IGNORED),
//! [`NOTED`](super::job::NOTED), [`LIMITED`](super::job::LIMITED)). All unsupported options are
//! reported together, with their line numbers.

mod expand;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use self::expand::{expand, without_comment};
use super::job::{Amount, Job, KbBase, Units};

/// Maximum number of files included by a job file, directly or indirectly.
const MAX_INCLUDES: usize = 64;

/// Jobs in the order of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct JobFile {
    /// Groups of jobs. Jobs in a group run concurrently, and groups run sequentially.
    pub groups: Vec<Vec<Job>>,
    /// Options that have no effect, with their positions.
    pub ignored: Vec<(SourceLocation, String)>,
    /// Names of files and directories that are replaced by the address.
    pub replaced: Vec<String>,
    /// Meaning of `k` at the end of each section, if this is the same for all.
    pub kb_base: Option<KbBase>,
}

/// A position in a job file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLocation {
    /// Name of the file.
    pub file: String,
    /// Line number, starting from 1.
    pub line: usize,
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// An error in a job file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobFileError {
    /// Position of the error.
    pub place: SourceLocation,
    /// Description of the error.
    pub reason: String,
}

impl fmt::Display for JobFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.reason)
    }
}

/// All errors in a job file. This is never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobFileErrors(pub Vec<JobFileError>);

impl fmt::Display for JobFileErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl std::error::Error for JobFileErrors {}

/// Sources for a job file in addition to its text.
pub struct Sources<'a> {
    /// Returns the value of an environment variable.
    pub env: &'a dyn Fn(&str) -> Option<String>,
    /// Reads an included file.
    pub read: &'a dyn Fn(&Path) -> io::Result<String>,
    /// Set if an address was specified, which replaces the files and directories of all jobs.
    pub has_address: bool,
}

impl fmt::Debug for Sources<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources").finish_non_exhaustive()
    }
}

/// A section that is being parsed.
#[derive(Clone)]
struct Section {
    job: Job,
    base: KbBase,
    /// Size of the file that fio would create.
    filesize: Option<Amount>,
}

/// Parses a job file.
///
/// # Errors
/// Returns all lines that are invalid or not supported.
pub fn parse(file: &str, text: &str, sources: &Sources<'_>) -> Result<JobFile, JobFileErrors> {
    let mut parser = Parser {
        sources,
        global: Section {
            job: Job::default(),
            base: KbBase::default(),
            filesize: None,
        },
        open: None,
        is_global: false,
        sections: Vec::new(),
        includes: 0,
        ignored: Vec::new(),
        replaced: Vec::new(),
        errors: Vec::new(),
    };
    parser.read_file(file, text);
    parser.close();
    if parser.sections.is_empty() && parser.errors.is_empty() {
        parser.errors.push(JobFileError {
            place: SourceLocation {
                file: file.to_owned(),
                line: text.lines().count().max(1),
            },
            reason: "missing job: a job is a section such as [name]".into(),
        });
    }
    if !parser.errors.is_empty() {
        return Err(JobFileErrors(parser.errors));
    }
    let base = parser.sections[0].base;
    let is_same = parser.sections.iter().all(|section| section.base == base);
    let mut groups: Vec<Vec<Job>> = Vec::new();
    for Section { job, .. } in parser.sections {
        match groups.last_mut() {
            Some(group) if !job.stonewall => group.push(job),
            _ => groups.push(vec![job]),
        }
    }
    Ok(JobFile {
        groups,
        ignored: parser.ignored,
        replaced: parser.replaced,
        kb_base: is_same.then_some(base),
    })
}

struct Parser<'a> {
    sources: &'a Sources<'a>,
    global: Section,
    /// The job section that is being parsed.
    open: Option<Section>,
    is_global: bool,
    sections: Vec<Section>,
    /// Number of files included so far.
    includes: usize,
    ignored: Vec<(SourceLocation, String)>,
    replaced: Vec<String>,
    errors: Vec<JobFileError>,
}

impl Parser<'_> {
    /// Reads the lines of a file, stopping if there are too many `include` lines.
    fn read_file(&mut self, file: &str, text: &str) {
        for (index, line) in text.lines().enumerate() {
            if self.includes > MAX_INCLUDES {
                return;
            }
            let place = SourceLocation {
                file: file.to_owned(),
                line: index + 1,
            };
            let line = expand(without_comment(line), self.sources.env);
            let read = line.and_then(|line| self.read_line(line.trim(), &place));
            if let Err(reason) = read {
                self.errors.push(JobFileError { place, reason });
            }
        }
    }

    fn read_line(&mut self, line: &str, place: &SourceLocation) -> Result<(), String> {
        if line.is_empty() {
            return Ok(());
        }
        if let Some(rest) = line.strip_prefix('[') {
            return self.begin_section(line, rest);
        }
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => (name.trim(), Some(value.trim())),
            // This is the only line that separates its value with whitespace.
            None => match line.split_once(char::is_whitespace) {
                Some(("include", file)) => ("include", Some(file.trim())),
                _ => (line, None),
            },
        };
        if name == "include" {
            let file = value.filter(|file| !file.is_empty());
            let file = file.ok_or_else(|| "missing file name after `include`".to_owned())?;
            return self.include(file, place);
        }
        let section = match &mut self.open {
            Some(section) => section,
            None if self.is_global => &mut self.global,
            None => return Err(format!("option `{name}` precedes the first section")),
        };
        if self.sources.has_address && matches!(name, "filename" | "directory") {
            let replaced = format!("{name}={}", value.unwrap_or_default());
            if !self.replaced.contains(&replaced) {
                self.replaced.push(replaced);
            }
            return Ok(());
        }
        if !section.set(name, value)? {
            self.ignored.push((place.clone(), name.to_owned()));
        }
        Ok(())
    }

    fn begin_section(&mut self, line: &str, rest: &str) -> Result<(), String> {
        let name = rest.strip_suffix(']').map(str::trim);
        let name = name.filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| format!("invalid section `{line}`: expected [name]"))?;
        self.close();
        self.is_global = name == "global";
        if !self.is_global {
            let mut section = self.global.clone();
            section.job.name = name.to_owned();
            self.open = Some(section);
        }
        Ok(())
    }

    /// Reads the lines of another file. As in fio, the path may be relative to the including file.
    fn include(&mut self, name: &str, place: &SourceLocation) -> Result<(), String> {
        self.includes += 1;
        if self.includes > MAX_INCLUDES {
            return Err(format!(
                "`include {name}` exceeds the limit of {MAX_INCLUDES} included files"
            ));
        }
        let relative = Path::new(&place.file).parent().map(|dir| dir.join(name));
        let paths = [Some(PathBuf::from(name)), relative];
        let mut error = None;
        for path in paths.into_iter().flatten() {
            match (self.sources.read)(&path) {
                Ok(text) => {
                    self.read_file(&path.display().to_string(), &text);
                    return Ok(());
                }
                Err(e) => error = Some(e),
            }
        }
        let error = error.map_or_else(String::new, |e| format!(": {e}"));
        Err(format!("cannot read the included file {name}{error}"))
    }

    /// Completes the section.
    fn close(&mut self) {
        let section = self.open.take().map(Section::finish);
        self.sections.extend(section);
    }
}

impl Section {
    fn set(&mut self, name: &str, value: Option<&str>) -> Result<bool, String> {
        let units = Units::Fio(self.base);
        match name {
            "kb_base" => {
                self.base = match value {
                    Some("1024") => KbBase::Binary,
                    Some("1000") => KbBase::Decimal,
                    _ => return Err("invalid kb_base: expected 1024 or 1000".into()),
                };
                Ok(true)
            }
            "filesize" => {
                let text = value.unwrap_or_default();
                let size = units
                    .size(text)
                    .map_err(|why| format!("{why}; only a single size is supported"))?;
                self.filesize = Some(Amount::Bytes(size)).filter(|_| size > 0);
                Ok(true)
            }
            // These options are only available on the command line.
            "state" | "sessions" | "fua" | "total" => Err(format!("unknown option `{name}`")),
            _ => self.job.set(name, value, units),
        }
    }

    /// Completes the section. The region has the same size as the file that fio would create.
    fn finish(mut self) -> Self {
        if let Some(Amount::Bytes(file)) = self.filesize {
            self.job.size = match self.job.size {
                Some(Amount::Bytes(size)) => Some(Amount::Bytes(size.min(file))),
                Some(Amount::Percent(percent)) => {
                    Some(Amount::Bytes(Amount::Percent(percent).exact(file)))
                }
                None => self.filesize,
            };
        }
        self
    }
}

#[cfg(test)]
mod tests;
