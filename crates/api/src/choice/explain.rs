//! Displays a [`PoolChoice`] as text: one line per pool, short enough for an event or a terminal.

use std::fmt;

use super::{ChosenPool, PassOverReason, PassedOver, PoolChoice, PoolRank, SelectorSubject};

/// At most this many pools are listed by name; further pools are only counted.
const NAMED: usize = 8;

impl fmt::Display for PoolChoice<'_> {
    /// Writes the chosen pools in their order. Then writes the other pools, beginning with those closest to being
    /// chosen. The text does not end with a line feed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.chosen.is_empty() {
            f.write_str("no pool serves")?;
            if self.passed_over.is_empty() {
                return f.write_str(": there is none: create an IPPool");
            }
            writeln!(f)?;
        }
        let mut others: Vec<&PassedOver> = self.passed_over.iter().collect();
        others.sort_by_key(|other| (other.why.distance(), other.name));
        let chosen = self.chosen.len().min(NAMED);
        let passed = others.len().min(NAMED - chosen);
        for (nth, pool) in self.chosen.iter().enumerate().take(chosen) {
            if nth > 0 {
                writeln!(f)?;
            }
            line(f, nth, pool, self.chosen.get(nth + 1))?;
        }
        for (nth, pool) in others.iter().enumerate().take(passed) {
            if nth > 0 || chosen > 0 {
                writeln!(f)?;
            }
            write!(f, "not \"{}\": {}", pool.name, pool.why)?;
        }
        let more = (self.chosen.len() - chosen, others.len() - passed);
        match more {
            (0, 0) => Ok(()),
            (serve, 0) => write!(f, "\nand {serve} more that serve"),
            (0, not) => write!(f, "\nand {not} more that do not serve"),
            (serve, not) => write!(
                f,
                "\nand {} more: {serve} that serve, {not} that do not",
                serve + not
            ),
        }
    }
}

/// Writes the line of a chosen pool, with the reason why the pool comes before `next`.
fn line(
    f: &mut fmt::Formatter,
    nth: usize,
    pool: &ChosenPool,
    next: Option<&ChosenPool>,
) -> fmt::Result {
    let ordinal = match nth + 1 {
        1 => "1st",
        2 => "2nd",
        3 => "3rd",
        n => &format!("{n}th"),
    };
    write!(f, "{ordinal} \"{}\": ", pool.name)?;
    let next_lacks = next.is_some_and(|next| next.lacks.is_some());
    match (pool.place, next.map(|next| (next.name, next.place))) {
        (PoolRank::Asked, _) => write!(f, "asked for by name")?,
        (PoolRank::Ranked { priority, .. }, None | Some((_, PoolRank::Asked))) => {
            write!(f, "priority {priority}")?;
        }
        (
            PoolRank::Ranked {
                priority: mine,
                requirements,
                room,
            },
            Some((
                next,
                PoolRank::Ranked {
                    priority: theirs,
                    requirements: fewer,
                    room: less,
                },
            )),
        ) => {
            write!(f, "priority {mine}, before \"{next}\": ")?;
            if mine != theirs {
                write!(f, "higher priority ({mine} to {theirs})")?;
            } else if requirements != fewer {
                let noun = if requirements == 1 { "" } else { "s" };
                write!(
                    f,
                    "more specific ({requirements} requirement{noun} to {fewer})"
                )?;
            } else if pool.lacks.is_none() && next_lacks {
                write!(f, "the families of the oldest")?;
            } else if let (Some(room), Some(less)) = (room, less)
                && room != less
            {
                write!(f, "more room ({room} to {less})")?;
            } else {
                write!(f, "equal in all else, by name")?;
            }
        }
    }
    if let Some(family) = pool.lacks {
        write!(
            f,
            "; only when asked for by name: it gives no {family}, and an older pool of the same rank does (make one pool of both families, or give them priorities)"
        )?;
    }
    if pool.some_pods_only {
        write!(
            f,
            "; for some pods only, by namespaceSelector or podSelector"
        )?;
    }
    Ok(())
}

impl PassOverReason<'_> {
    /// Returns how far the pool is from being chosen. Users ask most about a requested name that no pool has, and about
    /// a pool that cannot serve although its selectors match or it was requested by name. So these reasons have the
    /// lowest numbers.
    fn distance(&self) -> u8 {
        match self {
            PassOverReason::Unknown => 0,
            PassOverReason::Barred(_) => 1,
            PassOverReason::Manual => 2,
            PassOverReason::Deselected { .. } => 3,
            PassOverReason::NotAsked => 4,
        }
    }
}

impl fmt::Display for PassOverReason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PassOverReason::Unknown => write!(
                f,
                "asked for by name, but there is no such pool: create it, or correct the name"
            ),
            PassOverReason::Barred(why) => why.fmt(f),
            PassOverReason::Manual => write!(f, "Manual: only when asked for by name"),
            PassOverReason::Deselected {
                subject,
                wants,
                has,
            } => {
                let key = wants.key();
                match has {
                    Some(value) => write!(f, "{subject} label {key} is \"{value}\"")?,
                    None => write!(f, "{subject} has no label {key}")?,
                }
                write!(f, ", {subject}Selector wants {wants}")
            }
            PassOverReason::NotAsked => write!(f, "others were asked for by name"),
        }
    }
}

impl fmt::Display for SelectorSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SelectorSubject::Node => "node",
            SelectorSubject::Namespace => "namespace",
            SelectorSubject::Pod => "pod",
        })
    }
}
