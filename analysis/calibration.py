from toolkit.errors import merged

if __name__ == "__main__":
    merged("analysis.calibration", "analysis.heads heads=[FOLDER] fit={NAME: TRACES} traces={NAME: TRACES, ...}")
