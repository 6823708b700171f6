//! Reports as a single HTML page without external resources. The style and all charts are included,
//! there are no scripts, and the page is well-formed XML. Colors depend on the light or dark mode
//! of the browser, and the page can be printed.
//!
//! The page contains the machine, a table of all runs, throughput and latency over time,
//! distributions ([`time`]), latency by load for sweeps, and rounds and CPU usage of each case
//! ([`load`]). Runs are grouped by [`cases`]. Charts are drawn by [`chart`] and [`bars`] using axes
//! from [`scale`].

mod bars;
mod cases;
mod chart;
mod escape;
mod load;
mod scale;
mod tables;
mod time;

use std::io::{self, Write};

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::machine::Machine;
use crate::outcome::Outcome;
use escape::escape;

const STYLE: &str = include_str!("style.css");

/// Writes a page for these outcomes.
///
/// # Errors
/// Returns errors from `out`.
pub fn write(out: &mut dyn Write, outcomes: &[Outcome], machine: &Machine) -> io::Result<()> {
    let title = title(outcomes);
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\
         <meta charset=\"utf-8\"/>\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\
         <meta name=\"generator\" content=\"riser {}\"/>\
         <title>{title}</title>\n<style>\n{STYLE}</style></head>\n<body>\n<main>\n<h1>{title}</h1>\n",
        env!("CARGO_PKG_VERSION")
    );
    facts(&mut page, outcomes, machine);
    tables::runs(&mut page, outcomes);
    load::latency_against_load(&mut page, outcomes);
    load::rounds(&mut page, outcomes);
    time::distributions(&mut page, outcomes);
    time::over_time(&mut page, outcomes);
    load::costs(&mut page, outcomes);
    page.push_str(
        "<h2>About the results</h2>\n<p class=\"soft\">A latency runs from the start of an operation \
         to its completion; where arrivals are planned, from the time when the operation was due. \
         Histograms have three significant digits. CPU time is of the whole process.</p>\n\
         </main>\n</body>\n</html>\n",
    );
    out.write_all(page.as_bytes())
}

/// Returns a title with the names of the first jobs.
fn title(outcomes: &[Outcome]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for outcome in outcomes {
        if !names.contains(&outcome.name.as_str()) {
            names.push(&outcome.name);
        }
    }
    let shown: Vec<_> = names
        .iter()
        .take(3)
        .map(|name| escape::shortened(name, 40))
        .collect();
    let more = match names.len().saturating_sub(3) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("Benchmark: {}{more}", shown.join(", "))
}

/// Adds the date, machine and disks.
fn facts(page: &mut String, outcomes: &[Outcome], machine: &Machine) {
    let started = outcomes.iter().map(|o| o.started).min();
    let started = started.and_then(|time| Timestamp::try_from(time).ok());
    let date = started.map_or("-".into(), |time| {
        let local = time.to_zoned(TimeZone::system());
        local.strftime("%Y-%m-%d %H:%M:%S %:z").to_string()
    });
    let mut disks: Vec<String> = outcomes.iter().map(Outcome::disk).collect();
    disks.sort_unstable();
    disks.dedup();
    let memory = super::show::bytes(machine.memory_bytes as f64);
    let facts = [
        ("Date", date),
        ("Kernel", machine.kernel.clone()),
        ("Processor", machine.cpu.clone()),
        ("Logical cores", machine.cores.to_string()),
        ("Memory", memory),
        ("Disk", disks.join(", ")),
    ];
    page.push_str("<dl class=\"facts\">");
    for (name, value) in facts {
        *page += &format!("<dt>{name}</dt><dd>{}</dd>", escape(&value));
    }
    page.push_str("</dl>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::sample;

    fn written(outcomes: &[Outcome]) -> String {
        let mut out = Vec::new();
        write(&mut out, outcomes, &sample::machine()).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// Checks that elements are nested correctly, that attributes are quoted, and that `&` always
    /// starts an XML reference.
    fn well_formed(page: &str) {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = page.strip_prefix("<!DOCTYPE html>").expect("it is HTML");
        while let Some(start) = rest.find(['<', '&', '>']) {
            if let Some(reference) = rest[start..].strip_prefix('&') {
                let (name, _) = reference.split_once(';').expect("it ends");
                let known = ["amp", "lt", "gt", "quot", "#39"].contains(&name);
                assert!(known, "&{name};");
                rest = reference;
                continue;
            }
            let tag = rest[start..].strip_prefix('<');
            let tag = tag.unwrap_or_else(|| panic!("`>` at {}", &rest[..start]));
            let (tag, after) = tag.split_once('>').expect("the element ends");
            rest = after;
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name), "{tag}");
                continue;
            }
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            assert!(!tag.contains(['<', '\'']), "{tag}");
            let name = tag.split([' ', '/']).next().unwrap();
            if !tag.ends_with('/') {
                open.push(name);
            }
        }
        assert_eq!(open, Vec::<&str>::new());
    }

    fn all() -> Vec<Outcome> {
        let mut outcomes = vec![sample::mixed("mixed", 1), sample::mixed("mixed", 2)];
        outcomes.push(sample::open_loop("open", 3));
        outcomes.extend(sample::sweep("4k", &[1, 4, 16, 64]));
        outcomes.extend(sample::sweep("64k", &[1, 4, 16, 64]));
        outcomes
    }

    #[test]
    fn page_is_complete_and_self_contained() {
        let page = written(&all());
        well_formed(&page);
        for heading in [
            "Runs",
            "Latency against load",
            "Comparison",
            "Distribution of latencies",
            "Over time",
            "Costs",
        ] {
            assert!(page.contains(&format!(">{heading}</h2>")), "{heading}");
        }
        // No resources are loaded and no scripts are executed. The XML namespace is not fetched.
        let page = page.replace("http://www.w3.org/1999/xhtml", "");
        for part in [
            "http:", "https:", "src=", "href=", "url(", "@import", "<script",
        ] {
            assert!(!page.contains(part), "{part}");
        }
        assert!(
            !page.contains("NaN") && !page.contains("inf"),
            "a figure is no number"
        );
    }

    #[test]
    fn title_lists_names_once() {
        let rounds = ["a", "b", "a", "b"].map(|name| sample::mixed(name, 1));
        assert_eq!(title(&rounds), "Benchmark: a, b");
        let many = ["a", "b", "c", "d", "a"].map(|name| sample::mixed(name, 1));
        assert_eq!(title(&many), "Benchmark: a, b, c and 1 more");
    }

    #[test]
    fn runs_show_disks_if_multiple() {
        let one = sample::mixed("a", 1);
        let other = Outcome {
            address: "nbd://localhost/x".into(),
            ..sample::mixed("a", 2)
        };
        let page = written(&[one.clone(), other]);
        well_formed(&page);
        let row = page.split("<tr><td>2</td>").nth(1).unwrap();
        let row = row.split("</tr>").next().unwrap();
        assert!(
            row.contains("<td class=\"t\">nbd://localhost/x</td>"),
            "{row}"
        );
        assert!(page.contains(" at srp://127.0.0.1/disk/0</span></h3>"));
        assert!(!written(&[one.clone(), one]).contains(">Disk</th>"));
    }

    #[test]
    fn hostile_names_stay_text() {
        let hostile = "</title><script>alert(1)</script>\"'&\x1b";
        let mut outcomes = all();
        for outcome in &mut outcomes {
            outcome.name = hostile.into();
            outcome.address = hostile.into();
            for (key, value) in &mut outcome.options {
                *value += hostile;
                if key == "rw" {
                    *key = hostile.into();
                }
            }
        }
        let page = written(&outcomes);
        well_formed(&page);
        assert!(!page.contains("<script"));
    }

    #[test]
    fn empty_sections_are_omitted() {
        let page = written(&[sample::open_loop("a", 1)]);
        well_formed(&page);
        assert!(!page.contains("Latency against load"));
        assert!(!page.contains(">Comparison<"));
        well_formed(&written(&[]));
        let mut idle = sample::open_loop("a", 1);
        idle.intervals.clear();
        for measured in &mut idle.measured {
            measured.service.reset();
            measured.response = None;
        }
        well_formed(&written(&[idle]));
    }

    #[test]
    fn page_reports_omitted_runs() {
        let depths: Vec<_> = (1..=40).collect();
        let page = written(&sample::sweep("4k", &depths));
        well_formed(&page);
        assert!(page.contains("the first 16 of 40 runs"), "no note");
    }
}
