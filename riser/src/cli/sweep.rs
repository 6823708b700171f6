//! Sweeps of `riser bench`: options with multiple values.

use riser_bench::Job;
use riser_bench::job::Units;

/// An option and its values.
#[derive(Debug)]
pub(super) struct Sweep {
    name: String,
    values: Vec<String>,
    form: Units,
}

impl Sweep {
    /// Parses `bs=4k,64k` or `depth=1..64`.
    ///
    /// # Errors
    /// Fails if this is invalid, or the option can't be used in a sweep.
    pub(super) fn parse(text: &str, form: Units) -> Result<Self, String> {
        let wrong = || {
            format!(
                "invalid sweep `{text}`: expected OPTION=VALUES, for example bs=4k,64k or depth=1..64"
            )
        };
        let (name, values) = text.split_once('=').ok_or_else(wrong)?;
        let name = match name.trim() {
            "depth" => "iodepth",
            "jobs" => "numjobs",
            "mix" => "rwmixread",
            "seed" => "randseed",
            name => name,
        };
        let refused = match name {
            // This would have no effect, because the address from the command line is always used.
            "filename" if form == Units::CommandLine => {
                Some("the address selects the disk; run the command for each disk")
            }
            "name" => Some("it has no effect on operations"),
            // Jobs are grouped before they are expanded by a sweep.
            "stonewall" | "wait_for_previous" => {
                Some("the job file determines which jobs run concurrently")
            }
            _ => None,
        };
        if let Some(why) = refused {
            return Err(format!("--sweep {text}: cannot sweep {name}: {why}"));
        }
        let mut all = Vec::new();
        for value in values.split(',').map(str::trim) {
            match value.split_once("..") {
                None => all.push(value.to_owned()),
                Some((low, high)) => all.extend(powers(low, high, form).ok_or_else(wrong)?),
            }
        }
        if all.iter().any(String::is_empty) {
            return Err(wrong());
        }
        Ok(Self {
            name: name.to_owned(),
            values: all,
            form,
        })
    }

    /// Returns the name of the option in fio.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Combines each group with each value, up to `limit` groups.
    ///
    /// # Errors
    /// Fails if a value is invalid or has no effect, or if there are too many groups.
    pub(super) fn combine(
        &self,
        groups: &[Vec<Job>],
        limit: usize,
    ) -> Result<Vec<Vec<Job>>, String> {
        let mut all = Vec::new();
        for group in groups {
            for value in &self.values {
                let mut group = group.clone();
                for job in &mut group {
                    self.set(job, value)?;
                }
                all.push(group);
                if all.len() > limit {
                    return Err(format!("more than {limit} runs"));
                }
            }
        }
        Ok(all)
    }

    fn set(&self, job: &mut Job, value: &str) -> Result<(), String> {
        let name = &self.name;
        let why = match job.set(name, Some(value), self.form) {
            Ok(true) => return Ok(()),
            Ok(false) => "the option has no effect here".into(),
            Err(why) => why,
        };
        Err(format!("--sweep {name}={value}: {why}"))
    }
}

/// Returns powers of two times the first number, up to the last number.
fn powers(low: &str, high: &str, form: Units) -> Option<Vec<String>> {
    let (low, high) = (form.size(low).ok()?, form.size(high).ok()?);
    let double = |n: &u64| n.checked_mul(2);
    let all = std::iter::successors(Some(low), double).take_while(|n| *n <= high);
    (0 < low && low <= high).then(|| all.map(|n| n.to_string()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_listed_or_doubled() {
        let values = |text| Sweep::parse(text, Units::CommandLine).map(|sweep| sweep.values);
        assert_eq!(values("depth=1..10").unwrap(), ["1", "2", "4", "8"]);
        assert_eq!(values("bs=4k,64k").unwrap(), ["4k", "64k"]);
        for text in [
            "depth",
            "depth=",
            "depth=4..1",
            "depth=0..4",
            "bs=4k,,8k",
            "depth=a..b",
        ] {
            assert!(
                values(text).unwrap_err().contains("invalid sweep"),
                "{text}"
            );
        }
    }
}
