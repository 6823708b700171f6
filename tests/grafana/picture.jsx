// Draws deploy/grafana/riserd.json with what a Prometheus at this page's own address has, by the components
// that Grafana itself draws with (@grafana/ui): what an administrator will see, where no Grafana can be
// installed. A kind of panel or option that is not known here is an error, so that the picture cannot
// differ from the dashboard without anybody noticing.
import { useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';
import {
  applyFieldOverrides, createTheme, dateTime, FieldColorModeId, FieldType, ThemeContext, toDataFrame,
} from '@grafana/data';
import { BigValue, BigValueColorMode, BigValueGraphMode, GlobalStyles, PanelChrome, TimeSeries } from '@grafana/ui';
import dashboard from '../../deploy/grafana/riserd.json';

const SECONDS = 60;
const CELL = 36;
const GAP = 8;
const theme = createTheme({ colors: { mode: 'dark' } });

async function ask(expression, range) {
  const query = expression.replaceAll('$__rate_interval', '5s').replaceAll('$target', '.*').replaceAll('$instance', '.*');
  if (query.includes('$')) throw new Error(`a variable that is not known: ${query}`);
  const [from, to] = range;
  const url = `/api/v1/query_range?query=${encodeURIComponent(query)}&start=${from}&end=${to}&step=1`;
  const answer = await (await fetch(url)).json();
  if (answer.status !== 'success') throw new Error(`${query}: ${answer.error}`);
  return answer.data.result;
}

const named = (format, labels) => format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? '');

// One frame for each series, with all seconds, so that gaps are gaps.
function frames(panel, answers, [from, to]) {
  const { defaults, overrides } = panel.fieldConfig;
  if (overrides.length > 0) throw new Error(`overrides are not known: ${panel.title}`);
  const custom = {
    drawStyle: 'line', lineInterpolation: 'linear', axisPlacement: 'auto', axisBorderShow: false,
    scaleDistribution: { type: 'linear' }, spanNulls: false, thresholdsStyle: { mode: 'off' },
    hideFrom: { legend: false, tooltip: false, viz: false },
    ...defaults.custom,
    stacking: { mode: 'none', group: 'A', ...defaults.custom?.stacking },
  };
  const times = Array.from({ length: to - from + 1 }, (_, n) => from + n);
  const series = panel.targets.flatMap((target, n) => answers[n].map(({ metric, values }) => {
    const known = new Map(values.map(([time, value]) => [time, Number(value)]));
    return toDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: times.map((time) => time * 1000), config: {} },
        {
          name: 'Value', type: FieldType.number, labels: metric,
          values: times.map((time) => known.get(time) ?? null),
          config: {
            color: { mode: FieldColorModeId.PaletteClassic }, ...defaults, custom,
            displayName: named(target.legendFormat ?? '', metric) || panel.title,
          },
        },
      ],
    });
  }));
  return applyFieldOverrides({
    data: series, theme, timeZone: 'browser', replaceVariables: (text) => text,
    fieldConfig: { defaults: {}, overrides: [] },
  });
}

function Stat({ panel, data, width, height }) {
  const field = data[0]?.fields[1];
  const last = field?.values.filter((value) => value !== null).at(-1);
  const value = field ? field.display(last) : { text: 'No data', numeric: NaN };
  const sparkline = { x: data[0]?.fields[0], y: field };
  return <BigValue theme={theme} width={width} height={height} value={{ ...value, color: value.color ?? theme.colors.success.main }}
    sparkline={panel.options.graphMode === 'area' && field ? sparkline : undefined}
    colorMode={BigValueColorMode.Value}
    graphMode={panel.options.graphMode === 'area' ? BigValueGraphMode.Area : BigValueGraphMode.None} />;
}

function Lines({ panel, data, width, height, range: [from, to] }) {
  if (data.length === 0) return 'No data';
  const timeRange = { from: dateTime(from * 1000), to: dateTime(to * 1000) };
  return <TimeSeries frames={data} width={width} height={height} timeZone="browser" legend={panel.options.legend}
    timeRange={{ ...timeRange, raw: timeRange }} structureRev={1} />;
}

// Buckets of a Prometheus histogram, each with the count of its own.
function Heatmap({ data, width, height, range: [from, to] }) {
  const bound = (frame) => Number(frame.fields[1].labels.le.replace('+Inf', 'Infinity'));
  const rows = [...data].sort((a, b) => bound(a) - bound(b));
  const counts = rows.map((row, n) => row.fields[1].values
    .map((value, at) => Math.max(0, (value ?? 0) - (n ? rows[n - 1].fields[1].values[at] ?? 0 : 0))));
  const first = counts.findIndex((row) => row.some(Boolean));
  const last = counts.findLastIndex((row) => row.some(Boolean));
  if (first < 0) return 'No data';
  const most = Math.max(...counts.flat());
  const shown = counts.slice(first, last + 1);
  const [left, bottom] = [64, 22];
  const [w, h] = [(width - left) / (to - from + 1), (height - bottom) / shown.length];
  const label = { fill: theme.colors.text.primary, fontSize: 11, fontFamily: theme.typography.fontFamily };
  const format = (frame) => {
    const shows = frame.fields[1].display(bound(frame));
    return `${shows.text}${shows.suffix ?? ''}`;
  };
  return <svg width={width} height={height}>
    {shown.flatMap((row, n) => row.map((count, at) => count > 0 && <rect key={`${n} ${at}`} x={left + at * w}
      y={height - bottom - (n + 1) * h} width={w} height={h} fill="#ff9830" opacity={0.1 + 0.9 * count / most} />))}
    {shown.map((_, n) => n % Math.ceil(shown.length / 8) === 0 && <text key={n} {...label} textAnchor="end"
      x={left - 6} y={height - bottom - n * h}>{format(rows[first + n])}</text>)}
    {[0.25, 0.5, 0.75].map((part) => <text key={part} {...label} textAnchor="middle" x={left + part * (width - left)}
      y={height - 6}>{new Date((from + part * (to - from)) * 1000).toTimeString().slice(0, 8)}</text>)}
  </svg>;
}

const KINDS = { stat: Stat, timeseries: Lines, heatmap: Heatmap };

function Panel({ panel, answers, range }) {
  const { x, y, w, h } = panel.gridPos;
  const cell = (document.documentElement.clientWidth - GAP) / 24;
  const [width, height] = [w * cell - GAP, h * CELL - GAP];
  const place = { position: 'absolute', left: x * cell + GAP, top: y * CELL + GAP, width, height };
  if (panel.type === 'row') return <div style={{ ...place, ...theme.typography.h5, color: theme.colors.text.primary }}>{panel.title}</div>;
  const Kind = KINDS[panel.type];
  if (!Kind) throw new Error(`a kind of panel that is not known: ${panel.type}`);
  return <div style={place}>
    <PanelChrome title={panel.title} width={width} height={height} padding="md">
      {(innerWidth, innerHeight) => <Kind panel={panel} data={frames(panel, answers, range)} range={range}
        width={innerWidth} height={innerHeight} />}
    </PanelChrome>
  </div>;
}

function Dashboard() {
  const [state, setState] = useState(null);
  useEffect(() => {
    const load = async () => {
      const to = Math.floor(Date.now() / 1000) - 1;
      const range = [to - SECONDS, to];
      const answers = await Promise.all(dashboard.panels.map((panel) =>
        Promise.all((panel.targets ?? []).map((target) => ask(target.expr, range)))));
      setState({ answers, range });
    };
    load().catch((error) => { document.title = `failed: ${error.message}`; throw error; });
  }, []);
  useEffect(() => { if (state) requestAnimationFrame(() => { document.title = 'drawn'; }); }, [state]);
  if (!state) return null;
  return dashboard.panels.map((panel, n) =>
    <Panel key={n} panel={panel} answers={state.answers[n]} range={state.range} />);
}

document.body.style.background = theme.colors.background.canvas;
createRoot(document.getElementById('dashboard')).render(
  <ThemeContext.Provider value={theme}><GlobalStyles /><Dashboard /></ThemeContext.Provider>);
