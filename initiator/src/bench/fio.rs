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
//! ```
//!
//! Options that mean nothing here but do no harm are accepted ([`IGNORED`](super::job::IGNORED),
//! [`LIMITED`](super::job::LIMITED)); one that is not supported is an error that names its line.

use std::fmt;

use super::job::{Job, KbBase, Units};

/// Jobs of a file, in its order.
#[derive(Clone, Debug, PartialEq)]
pub struct JobFile {
    /// Groups of jobs that run side by side, one group after another.
    pub groups: Vec<Vec<Job>>,
    /// Lines with options that have no effect: number from 1, option.
    pub ignored: Vec<(usize, String)>,
    /// Meaning of `k` at the end of the sections, if it is the same in all of them.
    pub kb_base: Option<KbBase>,
}

/// An error in a job file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobFileError {
    /// Name of the file.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
    /// Description of the mistake.
    pub reason: String,
}

impl fmt::Display for JobFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.reason)
    }
}

impl std::error::Error for JobFileError {}

/// A section that is being read.
#[derive(Clone)]
struct Section {
    job: Job,
    base: KbBase,
}

/// Reads a job file. `env` gives the variables of `${NAME}`.
///
/// # Errors
/// The first line that is wrong, or not supported.
pub fn parse(
    file: &str,
    text: &str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<JobFile, JobFileError> {
    let mut parser = Parser {
        global: Section {
            job: Job::default(),
            base: KbBase::default(),
        },
        open: None,
        is_global: false,
        sections: Vec::new(),
        ignored: Vec::new(),
    };
    let mut last = 1;
    for (index, line) in text.lines().enumerate() {
        last = index + 1;
        let fail = |reason| JobFileError {
            file: file.to_owned(),
            line: last,
            reason,
        };
        let line = expand(without_comment(line), env).map_err(fail)?;
        parser.handle(line.trim(), last).map_err(fail)?;
    }
    parser.close();
    let Some(first) = parser.sections.first() else {
        return Err(JobFileError {
            file: file.to_owned(),
            line: last,
            reason: "the file has no job: a section such as [name] is one".into(),
        });
    };
    let base = first.base;
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
        kb_base: is_same.then_some(base),
    })
}

struct Parser {
    global: Section,
    /// The section that a job is made of.
    open: Option<Section>,
    is_global: bool,
    sections: Vec<Section>,
    ignored: Vec<(usize, String)>,
}

impl Parser {
    fn handle(&mut self, line: &str, number: usize) -> Result<(), String> {
        if line.is_empty() {
            return Ok(());
        }
        if let Some(rest) = line.strip_prefix('[') {
            let name = rest.strip_suffix(']').map(str::trim);
            let name = name.filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| format!("`{line}` is not a section such as [name]"))?;
            self.close();
            self.is_global = name == "global";
            if !self.is_global {
                let mut section = self.global.clone();
                section.job.name = name.to_owned();
                self.open = Some(section);
            }
            return Ok(());
        }
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => (name.trim(), Some(value.trim())),
            // The only line with a value and no equals sign.
            None => match line.split_once(char::is_whitespace) {
                Some(("include", file)) => ("include", Some(file.trim())),
                _ => (line, None),
            },
        };
        let section = match &mut self.open {
            Some(section) => section,
            None if self.is_global => &mut self.global,
            None => return Err(format!("option `{name}` is in no section")),
        };
        if !section.set(name, value)? {
            self.ignored.push((number, name.to_owned()));
        }
        Ok(())
    }

    /// The section is complete.
    fn close(&mut self) {
        self.sections.extend(self.open.take());
    }
}

impl Section {
    fn set(&mut self, name: &str, value: Option<&str>) -> Result<bool, String> {
        if name == "kb_base" {
            self.base = match value {
                Some("1024") => KbBase::Binary,
                Some("1000") => KbBase::Decimal,
                _ => return Err("kb_base is neither 1024 nor 1000".into()),
            };
            return Ok(true);
        }
        // These are options of the command line.
        if matches!(name, "state" | "sessions" | "fua" | "total") {
            return Err(format!("option `{name}` is not known"));
        }
        self.job.set(name, value, Units::Fio(self.base))
    }
}

/// The line up to a comment, which begins with `;` or `#` at the start or after a blank.
fn without_comment(line: &str) -> &str {
    let mut before = ' ';
    for (at, c) in line.char_indices() {
        if matches!(c, ';' | '#') && before.is_whitespace() {
            return &line[..at];
        }
        before = c;
    }
    line
}

/// Replaces each `${NAME}` by the variable of the environment.
fn expand(line: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = line;
    while let Some(start) = rest.find("${") {
        let (before, variable) = rest.split_at(start);
        let end = variable.find('}');
        let end = end.ok_or_else(|| format!("`{variable}` has no closing brace"))?;
        let name = &variable[2..end];
        let value = env(name);
        let value = value.ok_or_else(|| format!("the environment has no variable `{name}`"))?;
        out += before;
        out += &value;
        rest = &variable[end + 1..];
    }
    out += rest;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::job::{Access, Amount, BlockSizes, Pattern};
    use super::*;

    fn parsed(text: &str) -> Result<JobFile, JobFileError> {
        let env = |name: &str| (name == "SIZE").then(|| "64m".to_owned());
        parse("test.fio", text, &env)
    }

    fn refused(text: &str) -> String {
        parsed(text).unwrap_err().to_string()
    }

    #[test]
    fn sections_inherit_the_globals_before_them() {
        let file = parsed(
            "; header\n# another\n[global]\nioengine=libaio\nbs = 8k ; two pages\ntime_based\n\
             runtime=2m\n\n[first]\nrw=randread\nsize=${SIZE}\n[global]\niodepth=16\n\
             [second]\nrw=write:64k\nsize=50%\n",
        )
        .unwrap();
        let [group] = file.groups.as_slice() else {
            panic!("one group")
        };
        let [first, second] = group.as_slice() else {
            panic!("two jobs")
        };
        assert_eq!(
            (first.name.as_str(), second.name.as_str()),
            ("first", "second")
        );
        assert_eq!((first.iodepth, second.iodepth), (1, 16));
        assert_eq!(first.sizes[0], BlockSizes::Fixed(8192));
        assert_eq!(
            (first.access, first.pattern),
            (Access::Read, Pattern::Random)
        );
        assert_eq!(first.size, Some(Amount::Bytes(64 << 20)));
        assert_eq!(second.size, Some(Amount::Percent(50)));
        assert_eq!(second.modifier, 65536);
        assert!(first.time_based && second.time_based);
        assert_eq!(first.runtime, Some(Duration::from_secs(120)));
        assert_eq!(file.ignored, [(4, "ioengine".to_owned())]);
    }

    #[test]
    fn a_stonewall_begins_a_group() {
        let file = parsed("[a]\nstonewall\n[b]\nrw=write\n[c]\nwait_for_previous\n[d]\n").unwrap();
        let names = |group: &Vec<Job>| group.iter().map(|j| j.name.clone()).collect::<String>();
        assert_eq!(
            file.groups.iter().map(names).collect::<Vec<_>>(),
            ["ab", "cd"]
        );
    }

    #[test]
    fn kb_base_changes_the_meaning_of_sizes() {
        let file = parsed("[global]\nkb_base=1000\n[a]\nbs=4ki\nio_size=8k\n").unwrap();
        let job = &file.groups[0][0];
        assert_eq!(job.sizes[0], BlockSizes::Fixed(4096));
        assert_eq!(job.io_size, Some(Amount::Bytes(8000)));
        assert_eq!(file.kb_base, Some(KbBase::Decimal));
        let mixed = parsed("[a]\nbs=4k\n[b]\nkb_base=1000\n").unwrap();
        assert_eq!(mixed.kb_base, None);
    }

    #[test]
    fn an_error_names_file_line_option_and_reason() {
        assert_eq!(
            refused("[a]\nrw=read\nthinktime=5\n"),
            "test.fio:3: option `thinktime` is not supported: there is no pause between operations; \
             rate_iops plans their times"
        );
        assert!(refused("[a]\nfrob=1\n").contains("test.fio:2: option `frob` is not known"));
        assert!(refused("rw=read\n").contains(":1: option `rw` is in no section"));
        assert!(refused("[a\n").contains("`[a` is not a section"));
        assert!(refused("[a]\nbs=4q\n").contains(":2: `4q` is not a size"));
        assert!(refused("[a]\nsize=${NOWHERE}\n").contains("no variable `NOWHERE`"));
        assert!(refused("[a]\nsize=${SIZE\n").contains("closing brace"));
        assert!(refused("[global]\nbs=4k\n").contains("no job"));
        assert!(refused("[a]\nstate=x\n").contains("`state` is not known"));
        let include = refused("[a]\ninclude other.fio\n");
        assert!(include.contains(":2: option `include` is not supported: a job file is one file"));
    }

    #[test]
    fn comments_begin_at_a_blank() {
        assert_eq!(without_comment("a=b;c#d"), "a=b;c#d");
        assert_eq!(without_comment("a=b ;c"), "a=b ");
        assert_eq!(without_comment("#a"), "");
    }
}
